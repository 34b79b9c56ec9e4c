//! Explains TLS connection errors to operators.
//!
//! Owns: the texts for the dialling end. Never: decides which peer is accepted.

use crate::PEER_NAME;
use rustls::{AlertDescription, CertificateError, Error, InvalidMessage};
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// The explanation of a TLS error at the dialling end, with a remedy; `None` for any other error.
fn reason(error: &io::Error) -> Option<String> {
    match error.get_ref()?.downcast_ref::<Error>()? {
        Error::AlertReceived(alert) if is_about_certificates(*alert) => Some(format!(
            "the other end refuses the certificate of this one ({alert:?}): both need certificates of \
             the same authority that are in force and for the name {PEER_NAME}"
        )),
        Error::AlertReceived(alert) => Some(format!(
            "the other end broke the TLS handshake off ({alert:?}): is it another release, or no peer of this fleet?"
        )),
        Error::InvalidCertificate(CertificateError::NotValidForNameContext {
            expected,
            presented,
        }) => {
            let (expected, presented) = (expected.to_str(), presented.join(", "));
            Some(format!(
                "the certificate of the other end is not for {expected}, it is for {presented}: every peer of a \
                 fleet needs one for {PEER_NAME}"
            ))
        }
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

/// The same error, with its explanation.
pub(crate) fn explain_connect_error(error: io::Error) -> io::Error {
    if error.kind() == io::ErrorKind::UnexpectedEof {
        let text = "the other end closed the connection during the TLS handshake: does it speak TLS at \
                    this port (--peer-tls)?";
        return io::Error::new(error.kind(), text);
    }
    explain(error)
}

pub(crate) fn explain(error: io::Error) -> io::Error {
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

/// A TLS connection whose errors carry their explanation: the other end may refuse a certificate
/// after the handshake has completed at this end, and readers of this stream may keep only the text
/// of an error.
#[derive(Debug)]
pub struct ExplainedStream<S>(pub S);

impl<S: AsyncRead + Unpin> AsyncRead for ExplainedStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let read = Pin::new(&mut self.0).poll_read(context, buffer);
        read.map_err(explain)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for ExplainedStream<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.0).poll_write(context, bytes);
        written.map_err(explain)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(context).map_err(explain)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(context)
    }
}
