//! The flags that set the addresses of a process, for the error of one that cannot be bound.
//!
//! Never: binds anything.

use anyhow::anyhow;
use cleave_node::NodeError;
use std::io::ErrorKind;

/// A flag of the command and its address, if it has one.
pub(super) type AddressFlag = (&'static str, Option<String>);

/// Adds the flag and the remedy to the error of an address that cannot be bound.
pub(super) fn with_flag(error: NodeError, flags: &[AddressFlag]) -> anyhow::Error {
    let Some((address, reason)) = error.unbound() else {
        return error.into();
    };
    let of_address = flags
        .iter()
        .filter(|(_, set)| set.as_deref() == Some(address));
    let of_address: Vec<&str> = of_address.map(|(flag, _)| *flag).collect();
    let named = of_address.join(" and ");
    let remedy = match reason.kind() {
        _ if of_address.len() > 1 => format!("{named} have the same address: give each its own"),
        ErrorKind::AddrInUse => format!(
            "a program listens there already: end it, or choose another address with {named}"
        ),
        ErrorKind::AddrNotAvailable => {
            format!("this machine has no such address: choose one that it has with {named}")
        }
        ErrorKind::PermissionDenied => {
            format!("ports below 1024 need a privilege: choose a higher one with {named}")
        }
        _ => format!("choose another address with {named}"),
    };
    anyhow!("{error}: {reason}; {remedy}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;

    fn text(kind: ErrorKind, flags: &[(&'static str, &str)]) -> String {
        let error = NodeError::Server(cleave_server::ServerError::Bind(
            "127.0.0.1:80".to_owned(),
            io::Error::from(kind),
        ));
        let flags: Vec<AddressFlag> = flags
            .iter()
            .map(|(flag, address)| (*flag, Some((*address).to_owned())))
            .collect();
        format!("{:#}", with_flag(error, &flags))
    }

    #[test]
    fn the_flag_of_the_address_is_named_with_the_remedy() {
        let flags = [("--listen", "h:1"), ("--admin-listen", "127.0.0.1:80")];
        for (kind, remedy) in [
            (ErrorKind::AddrInUse, "end it, or choose another address"),
            (ErrorKind::AddrNotAvailable, "has no such address"),
            (ErrorKind::PermissionDenied, "below 1024"),
            (ErrorKind::OutOfMemory, "choose another address"),
        ] {
            let text = text(kind, &flags);
            assert!(
                text.starts_with("cannot listen on 127.0.0.1:80: "),
                "{text}"
            );
            assert!(text.contains(remedy), "{text}");
            assert!(text.ends_with("with --admin-listen"), "{text}");
        }
    }

    #[test]
    fn two_flags_with_one_address_are_both_named() {
        let flags = [
            ("--listen", "127.0.0.1:80"),
            ("--admin-listen", "127.0.0.1:80"),
        ];
        let text = text(ErrorKind::AddrInUse, &flags);
        let both = "--listen and --admin-listen have the same address: give each its own";
        assert!(text.ends_with(both), "{text}");
    }
}
