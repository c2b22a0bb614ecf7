//! The addresses of a name, which may come late: of a server's own host as well as of the one that a client looks for.

use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use crate::deadline::{Backoff, Deadline};
use crate::error::{no_more_files, no_more_processes};
use crate::interrupt;
use crate::notice::while_waiting;

/// How long to try again when a name has no address: the resolver may just be starting.
const RESOLVE_RETRY_LIMIT: Duration = Duration::from_secs(10);
/// How long one look-up may take. The system asks each name server for 5 s, and for a short name that in each domain of its list. One that is
/// given up sooner begins anew each time, and never has its answer.
const LOOK_UP_LIMIT: Duration = Duration::from_secs(60);
/// The pause between two attempts grows from the first to the second.
pub(super) const PAUSES: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(250));

/// `host:port`, with brackets around an IPv6 address, whether or not it has them already.
pub fn host_port(host: &str, port: u16) -> String {
    let host = host.trim_matches(['[', ']']);
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

/// The addresses of `host:port`, as [`resolve`] finds them. A name without an address may get one soon, so it is tried again for as
/// long as a client tries: a host's own name comes as late as another's.
pub(super) fn resolve_patiently(address: &str, deadline: Deadline) -> io::Result<Vec<SocketAddr>> {
    let what = || {
        format!("this process waits for an address of the name in {address}, where it is to serve the store")
    };
    let until = deadline.at_most(naming());
    while_waiting(what, || repeat_look_up(until, || resolve(address, deadline)))
}

/// Looks up again until there is an address, or `deadline` has passed, or this thread's check has ended the wait.
fn repeat_look_up(
    deadline: Deadline,
    mut look_up: impl FnMut() -> io::Result<Vec<SocketAddr>>,
) -> io::Result<Vec<SocketAddr>> {
    let mut backoff = Backoff::new(PAUSES, deadline);
    loop {
        match look_up() {
            Err(error)
                if !backoff.is_last()
                    && interrupt::cause(&error).is_none()
                    && no_more_processes(&error).is_none()
                    && no_more_files(&error).is_none() =>
            {
                backoff.pause();
            }
            outcome => return outcome,
        }
    }
}

/// The addresses of `host:port`, IPv4 first: the server binds to the first of the same list.
pub fn resolve(address: &str, deadline: Deadline) -> io::Result<Vec<SocketAddr>> {
    let mut targets = resolve_in_order(address, deadline)?;
    targets.sort_by_key(SocketAddr::is_ipv6);
    targets.dedup();
    Ok(targets)
}

/// [`resolve`], in the system's order.
#[expect(clippy::disallowed_methods, reason = "a deadline is around it")]
pub(in crate::store) fn resolve_in_order(address: &str, deadline: Deadline) -> io::Result<Vec<SocketAddr>> {
    if let Ok(address) = address.parse() {
        return Ok(vec![address]);
    }
    let (name, deadline) = (address.to_owned(), deadline.at_most(LOOK_UP_LIMIT));
    within(deadline, move || {
        // The system knows an address of one link, fe80::1%eth0, and not with the brackets that keep it apart from the port.
        match name.strip_prefix('[').and_then(|rest| rest.rsplit_once("]:")) {
            Some((host, port)) => {
                let port = port.parse::<u16>().map_err(|_| io::ErrorKind::InvalidInput)?;
                Ok((host, port).to_socket_addrs()?.collect())
            }
            None => Ok(name.to_socket_addrs()?.collect()),
        }
    })
}

/// The system's resolver has no deadline, and may take half a minute. So it runs in a thread, for which this waits only
/// until the deadline.
fn within<T: Send + 'static>(
    deadline: Deadline,
    look_up: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    // Names in /etc/hosts are found even when the deadline has just passed.
    const MIN_RESOLVE_TIMEOUT: Duration = Duration::from_millis(20);
    let (answer, answered) = mpsc::channel();
    let run = move || drop(answer.send(look_up()));
    std::thread::Builder::new().name("phalanx-resolve".into()).spawn(run)?;
    let until = deadline.max(Deadline::after(MIN_RESOLVE_TIMEOUT));
    loop {
        match answered.recv_timeout(interrupt::at_most(until.remaining())) {
            Ok(outcome) => return outcome,
            Err(RecvTimeoutError::Timeout) if !until.has_passed() => interrupt::check_io()?,
            Err(RecvTimeoutError::Timeout) => {
                let why = "the system is still looking up the name";
                return Err(io::Error::new(io::ErrorKind::TimedOut, why));
            }
            Err(RecvTimeoutError::Disconnected) => {
                return Err(io::Error::other("the look-up of the name panicked"));
            }
        }
    }
}

/// How long to try again when a name has no address. In Kubernetes a pod's name gets one when the pod has been
/// scheduled.
pub(super) fn naming() -> Duration {
    if is_in_kubernetes() { Duration::MAX } else { RESOLVE_RETRY_LIMIT }
}

/// Whether this process is in a pod of Kubernetes, where names and hosts may come late.
pub(super) fn is_in_kubernetes() -> bool {
    std::env::var_os("KUBERNETES_SERVICE_HOST").is_some()
}

/// The remedy for an address whose name cannot be resolved.
pub(super) const NO_ADDRESS_REMEDY: &str = "is MASTER_ADDR (or the launcher's --rdzv-endpoint) spelled right, and does `getent hosts` \
                                  know it on this host? An IP address needs no look-up";

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::error::Error;
    use crate::interrupt::interruptible;

    #[test]
    fn a_resolver_that_hangs_costs_no_more_than_the_deadline() {
        let (never, answered) = mpsc::channel::<()>();
        let started = Instant::now();
        let hang = move || answered.recv().map_err(io::Error::other);
        let error = within(Deadline::after(Duration::from_millis(50)), hang).unwrap_err();
        assert!(error.kind() == io::ErrorKind::TimedOut && started.elapsed() < Duration::from_secs(5));
        drop(never);
        assert_eq!(within(Deadline::after(Duration::from_secs(20)), || Ok(7)).unwrap(), 7);
        // An address that needs no lookup needs no time.
        let past = Deadline::after(Duration::ZERO);
        assert_eq!(resolve("[::1]:80", past).unwrap(), ["[::1]:80".parse().unwrap()]);
    }

    #[test]
    fn an_address_of_one_link_has_its_interface() {
        let soon = Deadline::after(Duration::from_secs(20));
        // The loopback is the first interface of each network namespace.
        assert_eq!(resolve("[fe80::1%lo]:80", soon).unwrap(), ["[fe80::1%1]:80".parse().unwrap()]);
    }

    #[test]
    fn a_look_up_may_outlast_name_servers_that_do_not_answer() {
        // Two of them, each asked for a name in three domains.
        const { assert!(LOOK_UP_LIMIT.as_secs() > 2 * 3 * 5) }
    }

    #[test]
    fn a_name_that_gets_its_address_late_is_looked_up_again() {
        let (address, soon) = ("10.0.0.1:29400".parse().unwrap(), Deadline::after(Duration::from_secs(20)));
        let unknown = || io::Error::other("Name or service not known");
        let mut looked = 0;
        let found = repeat_look_up(soon, || {
            looked += 1;
            if looked < 4 { Err(unknown()) } else { Ok(vec![address]) }
        });
        assert_eq!((found.unwrap(), looked), (vec![address], 4));
        let error =
            repeat_look_up(Deadline::after(Duration::from_millis(20)), || Err(unknown())).unwrap_err();
        assert_eq!(error.to_string(), unknown().to_string());
        // Waiting gives this process no descriptors.
        let error = repeat_look_up(soon, || Err(io::Error::from_raw_os_error(24))).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(24));
    }

    #[test]
    fn a_thread_that_waits_for_a_resolver_may_end_that() {
        let (_never, answered) = mpsc::channel::<()>();
        let soon = Deadline::after(Duration::from_secs(20));
        let hang = move || answered.recv().map_err(io::Error::other);
        let mut looked = 0;
        let ended = interruptible(
            || Err(Error::aborted("enough")),
            || {
                let error = within(soon, hang).unwrap_err();
                repeat_look_up(soon, || {
                    looked += 1;
                    Err(interrupt::as_io(interrupt::cause(&error).unwrap()))
                })
            },
        );
        let cause = ended.as_ref().err().and_then(interrupt::cause);
        assert!(cause.is_some_and(|cause| cause.is_aborted()) && looked == 1, "{ended:?}");
    }

    #[test]
    fn an_ipv6_address_is_put_in_brackets_once() {
        let written = ["host", "::1", "[::1]"].map(|host| host_port(host, 7));
        assert_eq!(written, ["host:7", "[::1]:7", "[::1]:7"]);
    }
}
