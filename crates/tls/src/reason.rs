//! Why a TLS connection could not be made, in words.
//!
//! Owns: what an operator is told at the end that dialled. Never: decides who is let in.

use rustls::{AlertDescription, Error, InvalidMessage};
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// The meaning of a TLS error at the end that dialled, and what to do about it; `None` of any other error.
fn reason(error: &io::Error) -> Option<String> {
    match error.get_ref()?.downcast_ref::<Error>()? {
        Error::AlertReceived(alert) if is_about_certificates(*alert) => Some(format!(
            "the other end refuses the certificate of this one ({alert:?}): both need certificates of \
             the same authority that are in force"
        )),
        Error::AlertReceived(alert) => Some(format!(
            "the other end broke the TLS handshake off ({alert:?}): is it another release, or no peer of this fleet?"
        )),
        Error::InvalidCertificate(why) => Some(format!(
            "the certificate of the other end is refused here ({why:?}): both need certificates of the \
             same authority that are in force"
        )),
        Error::InvalidMessage(InvalidMessage::InvalidContentType) => Some(
            "the other end speaks no TLS at this port: give it --peer-tls too, or none to this one"
                .to_owned(),
        ),
        _ => None,
    }
}

/// The same error, with its reason before it.
pub(crate) fn explained(error: io::Error) -> io::Error {
    if error.kind() == io::ErrorKind::UnexpectedEof {
        let text = "the other end closed the connection during the TLS handshake: does it speak TLS at \
                    this port (--peer-tls)?";
        return io::Error::new(error.kind(), text);
    }
    with_reason(error)
}

fn with_reason(error: io::Error) -> io::Error {
    match reason(&error) {
        Some(reason) => io::Error::new(error.kind(), reason),
        None => error,
    }
}

fn is_about_certificates(alert: AlertDescription) -> bool {
    matches!(
        alert,
        AlertDescription::NoCertificate
            | AlertDescription::BadCertificate
            | AlertDescription::UnsupportedCertificate
            | AlertDescription::CertificateRevoked
            | AlertDescription::CertificateExpired
            | AlertDescription::CertificateUnknown
            | AlertDescription::UnknownCA
            | AlertDescription::AccessDenied
            | AlertDescription::DecryptError
            | AlertDescription::CertificateRequired
    )
}

/// A TLS connection whose errors say why it ended: the other end may refuse a certificate after the
/// handshake is over for this one, and what reads from here may keep an error's text alone.
#[derive(Debug)]
pub struct Explained<S>(pub S);

impl<S: AsyncRead + Unpin> AsyncRead for Explained<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let read = Pin::new(&mut self.0).poll_read(context, buffer);
        read.map_err(with_reason)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Explained<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.0).poll_write(context, bytes);
        written.map_err(with_reason)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0)
            .poll_flush(context)
            .map_err(with_reason)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(context)
    }
}
