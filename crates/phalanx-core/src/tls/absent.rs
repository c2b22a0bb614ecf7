//! In a build without TLS: the same names, of which no value can be made.

use std::convert::Infallible;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::path::Path;

use super::Binding;
use crate::error::{Error, Result};

/// The certificates by which processes authenticate each other. This build has no TLS, so there are none.
#[derive(Clone, Debug)]
pub struct Tls(Infallible);

impl Tls {
    /// # Errors
    /// Always: this build has no TLS.
    pub fn read(ca: &Path, _certificate: &Path, _key: &Path) -> Result<Self> {
        let cause = format!("{} asks for TLS, which this build does not have", ca.display());
        Err(Error::environment(cause)
            .with_remedy("build with the feature `tls`, or leave the certificates out"))
    }

    pub(crate) fn client(&self) -> io::Result<Session> {
        match self.0 {}
    }

    pub(crate) fn server(&self) -> io::Result<Session> {
        match self.0 {}
    }
}

#[derive(Debug)]
pub(crate) struct Session(Infallible);

impl Session {
    pub(crate) fn begin_with(&mut self, _bytes: Vec<u8>) {
        match self.0 {}
    }

    pub(crate) fn handshake(&mut self, _io: &mut (impl Read + Write)) -> io::Result<bool> {
        match self.0 {}
    }

    pub(crate) fn admit(&mut self) {
        match self.0 {}
    }

    pub(crate) fn binding(&self) -> io::Result<Binding> {
        match self.0 {}
    }

    pub(crate) fn send(&mut self, _io: &mut impl Write, _parts: &[IoSlice<'_>]) -> io::Result<(usize, bool)> {
        match self.0 {}
    }

    pub(crate) fn receive(
        &mut self,
        _io: &mut impl Read,
        _parts: &mut [IoSliceMut<'_>],
    ) -> io::Result<usize> {
        match self.0 {}
    }

    pub(crate) fn peek(&mut self, _io: &mut impl Read, _into: &mut [u8]) -> io::Result<usize> {
        match self.0 {}
    }

    pub(crate) fn holds_input(&self) -> bool {
        match self.0 {}
    }
}
