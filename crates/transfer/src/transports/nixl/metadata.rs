//! Checks the metadata of a remote agent before the library reads it: bytes from another process,
//! which the library does not validate.
//!
//! Never: reads inside the two parts that belong to UCX: the address of a worker and the key of a
//! memory region.
//! Invariant: the library gets the metadata of one agent with the agreed name, reached over UCX
//! only, with one memory region: the ring that was offered. No part is longer than the message that
//! it arrived in (`wire`).
//!
//! The format since NIXL 1.5: `nixlSerDes|`, then fields; each has a tag, its length in eight
//! bytes, its bytes and a `|`.

/// The end of a field.
const END: &[u8] = b"|";
/// The head of a descriptor: address, length and device, eight bytes each. The key of the memory
/// follows.
const PLACE_BYTES: usize = 24;
/// `NIXL_CAPI_MEM_DRAM`, as written in metadata.
const HOST_MEMORY: [u8; 4] = [0; 4];

/// The required contents of metadata.
#[derive(Clone, Copy, Debug)]
pub(super) struct ExpectedMetadata<'a> {
    /// The name of the agent.
    pub(super) agent: &'a str,
    /// The start address of its memory in its process, and the length in bytes.
    pub(super) memory: (u64, u64),
}

/// The mismatch that was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the peer's metadata is not what an agent of NIXL 1.5 writes: {0}")]
pub(super) struct AgentMetadataError(&'static str);

/// The bytes that were not read yet.
struct MetadataFields<'a>(&'a [u8]);

/// Checks whether these bytes may be passed to the library.
pub(super) fn check(
    metadata: &[u8],
    expected: ExpectedMetadata<'_>,
) -> Result<(), AgentMetadataError> {
    let mut fields = MetadataFields(metadata);
    let wrong = |problem| Err(AgentMetadataError(problem));
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
    let expected_area = [start.to_le_bytes(), len.to_le_bytes(), [0; 8]].concat();
    let (at, key) = fields
        .field(b"")?
        .split_at_checked(PLACE_BYTES)
        .ok_or(AgentMetadataError("memory without a place"))?;
    if at != expected_area {
        return wrong("other memory than was offered");
    }
    if key.is_empty() {
        return wrong("memory without a key");
    }
    if fields.0.is_empty() {
        Ok(())
    } else {
        wrong("something behind its end")
    }
}

impl<'a> MetadataFields<'a> {
    fn take(&mut self, expected: &[u8], problem: &'static str) -> Result<(), AgentMetadataError> {
        self.0 = self
            .0
            .strip_prefix(expected)
            .ok_or(AgentMetadataError(problem))?;
        Ok(())
    }

    /// The bytes of the next field, which must have this tag.
    fn field(&mut self, tag: &[u8]) -> Result<&'a [u8], AgentMetadataError> {
        self.take(tag, "a field that does not belong there")?;
        let cut = AgentMetadataError("it is cut short");
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

    const EXPECTED: ExpectedMetadata<'_> = ExpectedMetadata {
        agent: "cleave-2:1-from-1:1-7",
        memory: (0x7fe4_548f_f010, 1 << 20),
    };

    fn field(tag: &str, bytes: &[u8]) -> Vec<u8> {
        let len = (bytes.len() as u64).to_le_bytes();
        [tag.as_bytes(), &len, bytes, END].concat()
    }

    /// Metadata in the format of the library, with these two parts of UCX.
    pub(in crate::transports::nixl) fn metadata(
        expected: ExpectedMetadata<'_>,
        address: &[u8],
        key: &[u8],
    ) -> Vec<u8> {
        let one = 1u64.to_le_bytes();
        let (start, len) = expected.memory;
        let area = [start.to_le_bytes(), len.to_le_bytes(), [0; 8]].concat();
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
            field("", &[&area, key].concat()),
        ];
        [b"nixlSerDes|".to_vec(), fields.concat()].concat()
    }

    #[test]
    fn metadata_of_another_agent_or_memory_is_refused() {
        let good = metadata(EXPECTED, b"address", b"key");
        assert_eq!(check(&good, EXPECTED), Ok(()));
        let (start, len) = EXPECTED.memory;
        for (agent, memory, expected) in [
            ("cleave-2:1-from-1:1-8", (start, len), "name"),
            (EXPECTED.agent, (start + 1, len), "other memory"),
            (EXPECTED.agent, (start, len / 2), "other memory"),
        ] {
            let error = check(&good, ExpectedMetadata { agent, memory }).unwrap_err();
            assert!(error.to_string().contains(expected), "{error}");
        }
    }

    #[test]
    fn truncated_or_longer_metadata_is_refused() {
        let good = metadata(EXPECTED, &[7; 90], &[9; 40]);
        for keep in 0..good.len() {
            assert!(check(&good[..keep], EXPECTED).is_err(), "{keep}");
        }
        assert!(check(&[&good[..], b"|"].concat(), EXPECTED).is_err());
    }

    proptest! {
        /// Only the parts that belong to UCX may differ.
        #[test]
        fn a_flipped_bit_outside_ucx_fields_is_refused(at in 0usize..400, bit in 0u32..8) {
            let (address, key) = ([7; 90], [9; 40]);
            let good = metadata(EXPECTED, &address, &key);
            let at = at % good.len();
            let mut bad = good.clone();
            bad[at] ^= 1 << bit;
            let mut own = bad.clone();
            for (from, part) in [(&[7u8; 90][..], 90), (&[9u8; 40][..], 40)] {
                let offset = good.windows(part).position(|bytes| bytes == from).unwrap();
                own[offset..offset + part].copy_from_slice(from);
            }
            prop_assert_eq!(check(&bad, EXPECTED).is_ok(), own == good);
        }

        #[test]
        fn arbitrary_metadata_is_refused(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
            prop_assert!(check(&bytes, EXPECTED).is_err());
        }
    }
}
