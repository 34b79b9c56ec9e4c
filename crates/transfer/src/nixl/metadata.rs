//! What an agent is reached by, before the library reads it: bytes from another process, for code that does not look twice.
//!
//! Never: reads what lies inside the two parts that are UCX's own, a worker's address and a memory's key.
//! Invariant: the library is given one agent of the name that was agreed, reached by UCX alone, with one piece of memory:
//! the ring that was offered. Nothing of it is longer than the message that it came in (`wire`).
//!
//! Its form since NIXL 1.5: `nixlSerDes|`, then fields, each a tag, its length in eight bytes, its bytes and a `|`.

/// What a field's end looks like.
const END: &[u8] = b"|";
/// Of a descriptor: address, length and device, eight bytes each. The memory's key follows.
const PLACE_BYTES: usize = 24;
/// `NIXL_CAPI_MEM_DRAM`, as it is written there.
const HOST_MEMORY: [u8; 4] = [0; 4];

/// What metadata must say.
#[derive(Clone, Copy, Debug)]
pub(super) struct Expected<'a> {
    /// The agent's name.
    pub(super) agent: &'a str,
    /// Where its memory begins, in its process, and how many bytes it has.
    pub(super) memory: (u64, u64),
}

/// What is wrong with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the peer's metadata is not what an agent of NIXL 1.5 writes: {0}")]
pub(super) struct MetadataError(&'static str);

/// What of the bytes was not read yet.
struct Fields<'a>(&'a [u8]);

/// Whether these bytes may go to the library.
pub(super) fn check(metadata: &[u8], expected: Expected<'_>) -> Result<(), MetadataError> {
    let mut fields = Fields(metadata);
    let wrong = |what| Err(MetadataError(what));
    fields.take(b"nixlSerDes|", "its beginning")?;
    if fields.field(b"Agent")? != expected.agent.as_bytes() {
        return wrong("another agent's name");
    }
    if fields.field(b"Conns")? != 1u64.to_le_bytes() || fields.field(b"t")? != b"UCX" {
        return wrong("not one way to it, by UCX");
    }
    if fields.field(b"c")?.is_empty() {
        return wrong("no address");
    }
    if fields.field(b"")? != b"MemSection" || fields.field(b"nixlSecElms")? != 1u64.to_le_bytes() {
        return wrong("not one list of memory");
    }
    if fields.field(b"bknd")? != b"UCX" || fields.field(b"nixlDList")? != b"nixlSDList" {
        return wrong("memory that is not UCX's");
    }
    if fields.field(b"t")? != HOST_MEMORY || fields.field(b"n")? != 1u64.to_le_bytes() {
        return wrong("not one piece of host memory");
    }
    let (start, len) = expected.memory;
    let place = [start.to_le_bytes(), len.to_le_bytes(), [0; 8]].concat();
    let (at, key) = fields
        .field(b"")?
        .split_at_checked(PLACE_BYTES)
        .ok_or(MetadataError("memory without a place"))?;
    if at != place {
        return wrong("other memory than was offered");
    }
    if key.is_empty() {
        return wrong("memory without a key");
    }
    match fields.0.is_empty() {
        true => Ok(()),
        false => wrong("something behind its end"),
    }
}

impl<'a> Fields<'a> {
    fn take(&mut self, expected: &[u8], what: &'static str) -> Result<(), MetadataError> {
        self.0 = self.0.strip_prefix(expected).ok_or(MetadataError(what))?;
        Ok(())
    }

    /// The bytes of the next field, which must have this tag.
    fn field(&mut self, tag: &[u8]) -> Result<&'a [u8], MetadataError> {
        self.take(tag, "a field that does not belong there")?;
        let cut = MetadataError("it is cut short");
        let (len, rest) = self.0.split_first_chunk().ok_or(cut)?;
        let len = usize::try_from(u64::from_le_bytes(*len)).map_err(|_| cut)?;
        let (bytes, rest) = rest.split_at_checked(len).ok_or(cut)?;
        self.0 = rest;
        self.take(END, "a field without an end")?;
        Ok(bytes)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(super) mod tests {
    use super::*;
    use proptest::prelude::*;

    const EXPECTED: Expected<'_> = Expected {
        agent: "cleave-2:1-from-1:1-7",
        memory: (0x7fe4_548f_f010, 1 << 20),
    };

    fn field(tag: &str, bytes: &[u8]) -> Vec<u8> {
        let len = (bytes.len() as u64).to_le_bytes();
        [tag.as_bytes(), &len, bytes, END].concat()
    }

    /// As the library writes it; UCX's two parts are these.
    pub(in crate::nixl) fn metadata(expected: Expected<'_>, address: &[u8], key: &[u8]) -> Vec<u8> {
        let one = 1u64.to_le_bytes();
        let (start, len) = expected.memory;
        let place = [start.to_le_bytes(), len.to_le_bytes(), [0; 8]].concat();
        let fields = [
            field("Agent", expected.agent.as_bytes()),
            field("Conns", &one),
            field("t", b"UCX"),
            field("c", address),
            field("", b"MemSection"),
            field("nixlSecElms", &one),
            field("bknd", b"UCX"),
            field("nixlDList", b"nixlSDList"),
            field("t", &HOST_MEMORY),
            field("n", &one),
            field("", &[&place, key].concat()),
        ];
        [b"nixlSerDes|".to_vec(), fields.concat()].concat()
    }

    #[test]
    fn an_agent_of_another_name_or_memory_is_not_known() {
        let good = metadata(EXPECTED, b"address", b"key");
        assert_eq!(check(&good, EXPECTED), Ok(()));
        let (start, len) = EXPECTED.memory;
        for (agent, memory, says) in [
            ("cleave-2:1-from-1:1-8", (start, len), "name"),
            (EXPECTED.agent, (start + 1, len), "other memory"),
            (EXPECTED.agent, (start, len / 2), "other memory"),
        ] {
            let error = check(&good, Expected { agent, memory }).unwrap_err();
            assert!(error.to_string().contains(says), "{error}");
        }
    }

    #[test]
    fn metadata_that_is_cut_or_goes_on_is_refused_wherever_that_is() {
        let good = metadata(EXPECTED, &[7; 90], &[9; 40]);
        for keep in 0..good.len() {
            assert!(check(&good[..keep], EXPECTED).is_err(), "{keep}");
        }
        assert!(check(&[&good[..], b"|"].concat(), EXPECTED).is_err());
    }

    proptest! {
        /// Only what is UCX's own may differ.
        #[test]
        fn a_bit_that_flipped_is_seen_unless_it_is_the_devices(at in 0usize..400, bit in 0u32..8) {
            let (address, key) = ([7; 90], [9; 40]);
            let good = metadata(EXPECTED, &address, &key);
            let at = at % good.len();
            let mut bad = good.clone();
            bad[at] ^= 1 << bit;
            let mut own = bad.clone();
            for (from, part) in [(&[7u8; 90][..], 90), (&[9u8; 40][..], 40)] {
                let place = good.windows(part).position(|bytes| bytes == from).unwrap();
                own[place..place + part].copy_from_slice(from);
            }
            prop_assert_eq!(check(&bad, EXPECTED).is_ok(), own == good);
        }

        #[test]
        fn bytes_that_nobody_wrote_are_refused(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
            prop_assert!(check(&bytes, EXPECTED).is_err());
        }
    }
}
