//! Reports of clients that the job's stores have refused.

use std::io::{PipeReader, Read};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::poll::wake_pipe;
use crate::store::Refusals;

/// The launcher's side.
pub(super) struct Refused {
    pipe: PipeReader,
    /// Only the first refusal is reported; the others have the same reason.
    told: bool,
    refusals: Refusals,
}

impl Refused {
    pub(super) fn new() -> Result<Self> {
        // Neither the launcher nor a store blocks on the pipe.
        let (pipe, writer) =
            wake_pipe().map_err(|error| Error::io("cannot make a pipe for the store's messages", error))?;
        Ok(Self { pipe, told: false, refusals: Refusals(Arc::new(writer)) })
    }

    /// The stores' side.
    pub(super) fn refusals(&self) -> &Refusals {
        &self.refusals
    }

    /// Readable when there is a refusal to report.
    pub(super) fn notice(&self) -> Option<BorrowedFd<'_>> {
        (!self.told).then(|| self.pipe.as_fd())
    }

    /// The message about the first one.
    pub(super) fn read(&mut self) -> Option<String> {
        if self.told {
            return None;
        }
        let mut bytes = [0; 64];
        let count = self.pipe.read(&mut bytes).ok()?;
        self.told = true;
        let text = String::from_utf8_lossy(&bytes[..count]).into_owned();
        let address = text.lines().next().unwrap_or_default();
        Some(format!(
            "a client at {address} was not let into the store, because its key, or its certificate, is not this job's. \
             Another launcher needs the same --job-key-file and --tls-ca; programs that cannot know the key, \
             such as PyTorch's on other hosts, need --open-store, and a job without TLS"
        ))
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn the_first_is_told_once() {
        let mut refused = Refused::new().unwrap();
        assert!(refused.read().is_none() && refused.notice().is_some());
        let mut pipe = &*refused.refusals().0.clone();
        pipe.write_all(b"10.0.0.7\n10.0.0.8\n").unwrap();
        let text = refused.read().unwrap();
        assert!(text.contains("at 10.0.0.7 was") && text.contains("--open-store"), "{text}");
        pipe.write_all(b"10.0.0.9\n").unwrap();
        assert!(refused.read().is_none() && refused.notice().is_none());
    }
}
