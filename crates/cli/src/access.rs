//! Keys of clients and operators that come from flags and files.
//!
//! Owns: reading files of keys, and the policy that flags of keys stand for. Never: judges a
//! request, or shows a key.

use crate::args::{AccessArgs, ApiKey, ProcessArgs, ServerKeyArgs, parse_api_key};
use anyhow::{Context, anyhow, bail, ensure};
use cleave_api::AdminKey;
use cleave_domain::{HeaderTrust, SloPolicy, Tenant, TenantQuota};
use sha2::{Digest, Sha256};
use std::path::Path;

/// A file larger than this has more than keys.
const FILE_BYTES_MAX: u64 = 1 << 20;
/// Tenant of all keys of the flags, in metrics and logs.
const TENANT: &str = "api-key";

impl AccessArgs {
    /// The policy that the keys stand for: one tenant with all of them, and no request without one.
    /// None without keys.
    ///
    /// # Errors
    /// If a file of keys cannot be read or has none.
    pub(crate) fn policy(&self) -> anyhow::Result<Option<SloPolicy>> {
        let mut keys = self.api_key.clone();
        if let Some(path) = &self.api_key_file {
            keys.extend(
                read_keys(path).with_context(|| format!("--api-key-file {}", path.display()))?,
            );
        }
        if keys.is_empty() {
            return Ok(None);
        }
        let digest = |ApiKey(key): &ApiKey| Sha256::digest(key.as_bytes()).into();
        Ok(Some(SloPolicy {
            tenants: vec![Tenant {
                name: TENANT.to_owned(),
                key_digests: keys.iter().map(digest).collect(),
                share: 1,
                quota: TenantQuota::default(),
            }],
            trust: HeaderTrust {
                require_key: true,
                ..HeaderTrust::default()
            },
            ..SloPolicy::default()
        }))
    }
}

impl ProcessArgs {
    /// The operators' key, from its flag or its file.
    ///
    /// # Errors
    /// If the file cannot be read, or has not one key.
    pub(crate) fn admin_key(&self) -> anyhow::Result<Option<AdminKey>> {
        let Some(path) = &self.admin_key_file else {
            return Ok(self.admin_key);
        };
        let key = AdminKey::new(&read_admin_key(path)?);
        let about = || format!("--admin-key-file {}", path.display());
        key.map(Some)
            .map_err(|reason| anyhow!("{}: {reason}", about()))
    }
}

impl ServerKeyArgs {
    /// The key for requests to a server, from its flag or its file.
    ///
    /// # Errors
    /// If the file cannot be read, or has not one key.
    pub(crate) fn key(&self) -> anyhow::Result<Option<String>> {
        match &self.admin_key_file {
            Some(path) => read_admin_key(path).map(Some),
            None => Ok(self.admin_key.clone()),
        }
    }
}

/// Reads the one key of the file of `--admin-key-file`.
fn read_admin_key(path: &Path) -> anyhow::Result<String> {
    let about = || format!("--admin-key-file {}", path.display());
    let keys = read_keys(path).with_context(about)?;
    let [ApiKey(key)] = &keys[..] else {
        bail!("{}: it has {} keys; one is expected", about(), keys.len());
    };
    Ok(key.clone())
}

/// Reads the keys of a file, one in a line.
fn read_keys(path: &Path) -> anyhow::Result<Vec<ApiKey>> {
    let bytes = cleave_files::read(path, FILE_BYTES_MAX).context("it cannot be read")?;
    let text = str::from_utf8(&bytes).context("it is not text")?;
    let mut keys = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.trim();
        if !line.is_empty() {
            let key = parse_api_key(line);
            keys.push(key.map_err(|reason| anyhow!("line {number}: {reason}"))?);
        }
    }
    ensure!(!keys.is_empty(), "it has no key; one is expected in a line");
    Ok(keys)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use cleave_domain::RequestOrigin;
    use std::fs;

    #[derive(Parser)]
    struct AccessFlags {
        #[command(flatten)]
        access: AccessArgs,
        #[command(flatten)]
        process: ProcessArgs,
        /// Excludes keys, as the flag of a server does.
        #[arg(long)]
        policy: Option<String>,
    }

    fn flags(words: &[&str]) -> AccessFlags {
        AccessFlags::parse_from(std::iter::once(&"cleave").chain(words))
    }

    fn owner<'a>(policy: &'a SloPolicy, key: &str) -> Option<&'a str> {
        let origin = RequestOrigin {
            key_digest: Some(Sha256::digest(key.as_bytes()).into()),
            ..RequestOrigin::default()
        };
        policy.key_owner(&origin).map(|tenant| tenant.name.as_str())
    }

    #[test]
    fn keys_of_flags_and_file_are_one_tenant_and_required() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keys");
        fs::write(&path, "three\n\nfour\n").unwrap();
        let path = path.to_str().unwrap();
        let words = ["--api-key", "one", "two", "--api-key-file", path];
        let flags = flags(&words);
        let policy = flags.access.policy().unwrap().unwrap();
        assert!(policy.trust.require_key);
        for key in ["one", "two", "three", "four"] {
            assert_eq!(owner(&policy, key), Some("api-key"), "{key}");
        }
        assert_eq!(owner(&policy, "five"), None);
        assert_eq!(flags.policy, None);
        for key in [["--api-key", "one"], ["--api-key-file", path]] {
            let words = ["cleave", "--policy", "p.yaml"].iter().chain(&key);
            let both = AccessFlags::try_parse_from(words).err().unwrap();
            assert!(both.to_string().contains("--policy <POLICY>"), "{both}");
        }
        assert!(
            !format!("{:?}", flags.access).contains("one"),
            "no key is shown"
        );
    }

    #[test]
    fn a_file_without_keys_never_opens_the_server() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keys");
        for wrong in ["", "\n \n", "a b\n"] {
            fs::write(&path, wrong).unwrap();
            let path = path.to_str().unwrap();
            let keys = flags(&["--api-key-file", path]);
            assert!(keys.access.policy().is_err(), "{wrong:?}");
            let admin = flags(&["--admin-key-file", path]);
            assert!(admin.process.admin_key().is_err(), "{wrong:?}");
        }
        assert!(AccessFlags::try_parse_from(["cleave", "--api-key", ""]).is_err());
        assert_eq!(flags(&[]).access.policy().unwrap(), None);
    }

    #[test]
    fn the_admin_key_may_be_a_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key");
        fs::write(&path, "operators-key\n").unwrap();
        let path = path.to_str().unwrap();
        let read = flags(&["--admin-key-file", path])
            .process
            .admin_key()
            .unwrap();
        let given = flags(&["--admin-key", "operators-key"]).process.admin_key();
        assert_eq!(read, given.unwrap());
        let both = ["cleave", "--admin-key", "a", "--admin-key-file", path];
        assert!(AccessFlags::try_parse_from(both).is_err());
        fs::write(path, "a\nb\n").unwrap();
        let two = flags(&["--admin-key-file", path]).process.admin_key();
        assert!(two.unwrap_err().to_string().contains("2 keys"));
    }
}
