//! Network interfaces of this host, or container.

use std::ffi::{CStr, c_short};
use std::io;
use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::AsRawFd;

/// Whether the interface of this name is up.
///
/// # Errors
/// If there is none, or the system does not say.
pub fn is_up(name: &CStr) -> io::Result<bool> {
    // Any socket will do.
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    // SAFETY: all its fields are numbers, or arrays and a union of them, for which zero is a value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    let bytes = name.to_bytes_with_nul();
    if bytes.len() > request.ifr_name.len() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (place, byte) in request.ifr_name.iter_mut().zip(bytes) {
        *place = byte.cast_signed() as _;
    }
    // SAFETY: the descriptor is open while `socket` lives, and the kernel reads and writes `request` alone.
    if unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFFLAGS, &raw mut request) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has written this field.
    let flags = unsafe { request.ifr_ifru.ifru_flags };
    Ok(flags & libc::IFF_UP as c_short != 0)
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;

    #[test]
    fn the_loopback_is_up_and_others_do_not_exist() {
        assert!(is_up(c"lo").unwrap());
        assert!(is_up(c"none-such").is_err() && is_up(c"a name that is too long").is_err());
    }
}
