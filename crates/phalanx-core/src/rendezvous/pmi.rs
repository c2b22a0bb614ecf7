//! At an address that rank 0 tells the others through the launcher's PMI: under the mpirun of MPICH and Intel MPI, without a variable
//! set by hand and without their libraries.
//!
//! A process has one connection to its launcher, and one conversation on it: `phalanx_proto::launch::pmi` says why it ends at once. So
//! the address is kept for the process's life, for ranks that meet again, and the port with it. A program that uses MPI itself needs the
//! connection for `MPI_Init`: where its library is in this process, the start is refused before anything is sent.

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use parking_lot::Mutex;
use phalanx_proto::launch::pmi::{LINE_LIMIT, Request};
use rustix::event::{PollFd, PollFlags};
use socket2::{Domain, Protocol, Socket, Type};

use super::RankConfig;
use crate::deadline::Deadline;
use crate::env;
use crate::error::{Error, Result};
use crate::interfaces::{is_every_hosts, outward};
use crate::interrupt;
use crate::notice::Reminders;
use crate::poll::poll;
use crate::store::{host_port, resolve};

/// How long the launcher may take to answer what does not wait for other ranks.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// How long it may take to answer the last request of a process that gives up.
const LAST_ANSWER_TIMEOUT: Duration = Duration::from_secs(2);
/// How long the look-up of the host's name may take.
const LOOK_UP_TIMEOUT: Duration = Duration::from_secs(5);
/// How often a rank that waits looks whether a reminder is due.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);
/// Parts of the names of MPI's libraries in a list of mapped files.
const MPI_LIBRARIES: [&str; 3] = ["/libmpi.so", "/libmpich.so", "/libmpi_abi.so"];

const REMEDY: &str = "give mpirun MASTER_ADDR, an address of the host of rank 0, and MASTER_PORT, a free port there: \
                      mpirun -genv MASTER_ADDR node0 -genv MASTER_PORT 29500 .., or -genv PHALANX_RENDEZVOUS file:///a/shared/path";

/// What the ranks of this process's job have agreed on.
struct Agreed {
    address: String,
    /// Rank 0's port. A socket that does not listen keeps it from others.
    _port: Option<Socket>,
}

/// What has come of the conversation, if there was one: there is no other.
static AGREED: Mutex<Option<Result<Agreed>>> = Mutex::new(None);

/// What rank 0 tells in place of an address if it has none.
const NO_ADDRESS: &str = "none";

/// The address at which the ranks meet. `descriptor` is that of the connection to the launcher, `host` the launcher's name for this
/// host, and `port` a port that the user names.
pub(super) fn address(
    descriptor: i32,
    host: Option<&str>,
    port: u16,
    bind: Option<IpAddr>,
    config: &RankConfig,
    deadline: Deadline,
) -> Result<String> {
    let Some(mut agreed) = AGREED.try_lock_for(deadline.remaining()) else {
        return Err(Error::timeout(
            "another thread of this process has waited for the other ranks all the time",
        )
        .in_operation("rendezvous", None)
        .with_remedy("join from one thread of a process, or raise the time-out"));
    };
    if let Some(agreed) = &*agreed {
        return agreed.as_ref().map(|agreed| agreed.address.clone()).map_err(Error::clone);
    }
    let with_remedy = |error: Error| error.in_operation("rendezvous", None).with_remedy_if_none(REMEDY);
    let connection = connection(descriptor).map_err(with_remedy)?;
    let is_one_host = config.local.is_some_and(|(_, size)| size == config.world_size.get());
    let own = config.rank.is_main().then(|| own_address(host, port, bind, is_one_host));
    let reminders = Reminders::of(config.rank, config.world_size);
    let found = agree(connection, own, reminders, deadline).map_err(with_remedy);
    let address = found.as_ref().map(|found| found.address.clone()).map_err(Error::clone);
    *agreed = Some(found);
    address
}

/// `own` is rank 0's address; its failure is told to the others, who wait for it.
fn agree(
    connection: UnixStream,
    own: Option<Result<(SocketAddr, Socket)>>,
    reminders: Reminders,
    deadline: Deadline,
) -> Result<Agreed> {
    let told = own
        .as_ref()
        .map(|own| own.as_ref().map_or_else(|_| NO_ADDRESS.to_owned(), |(address, _)| address.to_string()));
    let found = exchange(connection, told, reminders, deadline);
    let port = own.transpose()?.map(|(_, port)| port);
    Ok(Agreed { address: found?.to_string(), _port: port })
}

/// The connection to the launcher.
fn connection(descriptor: i32) -> Result<UnixStream> {
    if let Some(library) = mpi_library() {
        return Err(Error::environment(format!(
            "this process has loaded MPI's library ({library}), which needs PMI_FD, the connection to mpirun over which the ranks would \
             find each other"
        )));
    }
    let lost = |error: std::io::Error| {
        let cause = format!(
            "PMI_FD={descriptor} is no connection to mpirun: what has started this process may have closed it"
        );
        Error::environment(format!("{cause} ({error})"))
    };
    let connection = phalanx_sys::inherited::stream(descriptor).map_err(lost)?;
    let peer = phalanx_sys::inherited::peer(&connection).map_err(lost)?;
    // The number may be that of something else by now.
    if u32::try_from(peer) == Ok(std::process::id()) {
        return Err(lost(std::io::Error::other("it is a socket of this process")));
    }
    Ok(connection)
}

/// The library of MPI that this process has loaded, if it has. One that is linked statically is not seen.
fn mpi_library() -> Option<String> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let paths = maps.lines().filter_map(|line| line.find('/').and_then(|at| line.get(at..)));
    let mut libraries = paths.filter(|path| MPI_LIBRARIES.iter().any(|name| path.contains(name)));
    libraries.next().map(str::to_owned)
}

/// The address of this host, that of rank 0, and a port there that is kept for it.
fn own_address(
    host: Option<&str>,
    port: u16,
    bind: Option<IpAddr>,
    is_one_host: bool,
) -> Result<(SocketAddr, Socket)> {
    let ip = match bind.filter(|bind| !bind.is_unspecified()) {
        Some(bind) if !is_one_host && is_every_hosts(bind) => {
            return Err(Error::environment(format!(
                "other hosts cannot reach rank 0, which PHALANX_BIND lets listen at {bind}"
            )));
        }
        Some(bind) => bind,
        None if is_one_host => Ipv4Addr::LOCALHOST.into(),
        None => {
            let look_up = |host: &str| resolve(&host_port(host, 0), Deadline::after(LOOK_UP_TIMEOUT));
            // Its failure is no error, so that of this thread's check is left for the next wait.
            let named =
                interrupt::undisturbed(|| host.and_then(|host| look_up(host).ok())).unwrap_or_default();
            let ip = outward(env::interface(), named.into_iter().map(|address| address.ip()).collect())?;
            if is_every_hosts(ip) {
                return Err(Error::environment(format!(
                    "other hosts cannot reach rank 0: its host has no address but {ip}"
                )));
            }
            ip
        }
    };
    let reserve = |address: SocketAddr| {
        let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
        socket.set_reuse_address(true)?;
        socket.bind(&address.into())?;
        let bound = socket.local_addr()?.as_socket();
        Ok((bound.map_or(0, |bound| bound.port()), socket))
    };
    let (port, socket) = reserve(SocketAddr::new(bind.unwrap_or(ip), port))
        .map_err(|error: std::io::Error| Error::io(format!("rank 0 gets no port at {ip}"), error))?;
    Ok((SocketAddr::new(ip, port), socket))
}

/// Tells the others `own`, rank 0's address or [`NO_ADDRESS`], and learns it from the launcher.
fn exchange(
    mut connection: UnixStream,
    own: Option<String>,
    reminders: Reminders,
    deadline: Deadline,
) -> Result<SocketAddr> {
    connection
        .set_write_timeout(Some(ANSWER_TIMEOUT))
        .map_err(|error| Error::io("the connection to mpirun (PMI_FD) is lost", error))?;
    let found = converse(&mut connection, own, reminders, deadline);
    // Without it the launcher would take this process's end for a crash. A wait for others that has failed has no other answer.
    let patience = if found.is_ok() { ANSWER_TIMEOUT } else { LAST_ANSWER_TIMEOUT };
    let ended = ask(&mut connection, &Request::Finalize, Deadline::after(patience), None);
    let found = found?;
    ended?;
    if found == NO_ADDRESS {
        return Err(Error::environment(
            "rank 0 has no address at which the others can reach it: its own error says why",
        ));
    }
    found
        .parse()
        .map_err(|_| Error::protocol(format!("{found:?}, which rank 0 has told by PMI, is no address")))
}

fn converse(
    connection: &mut UnixStream,
    own: Option<String>,
    mut reminders: Reminders,
    deadline: Deadline,
) -> Result<String> {
    let soon = |connection: &mut UnixStream, request: &Request| {
        ask(connection, request, deadline.at_most(ANSWER_TIMEOUT), None)
    };
    soon(connection, &Request::Init)?;
    let space = soon(connection, &Request::SpaceName)?;
    if let Some(own) = own {
        soon(connection, &Request::Put(space.clone(), own))?;
    }
    ask(connection, &Request::Barrier, deadline, Some(&mut reminders))?;
    soon(connection, &Request::Get(space))
}

/// Sends a request and reads its answer.
fn ask(
    connection: &mut UnixStream,
    request: &Request,
    deadline: Deadline,
    mut reminders: Option<&mut Reminders>,
) -> Result<String> {
    let lost = |error: std::io::Error| Error::io("the connection to mpirun (PMI_FD) is lost", error);
    connection.write_all(request.line().as_bytes()).map_err(lost)?;
    let mut line = Vec::new();
    while line.last() != Some(&b'\n') {
        if deadline.has_passed() {
            let what = request.line().trim_end().to_owned();
            return Err(match request {
                Request::Barrier => Error::timeout(
                    "not all processes that mpirun has started came to PMI's barrier: each of them has to be a rank of this program",
                ),
                _ => Error::timeout(format!("mpirun has not answered {what:?}")),
            });
        }
        if let Some(reminders) = &mut reminders {
            reminders.remind(|| "this process waits for the others at mpirun's barrier".to_owned());
        }
        let wait = deadline.remaining().min(LOOK_INTERVAL);
        let mut waiting = [PollFd::from_borrowed_fd(connection.as_fd(), PollFlags::IN)];
        if poll(&mut waiting, Some(wait)).map_err(lost)? == 0 {
            continue;
        }
        let mut bytes = [0; 512];
        match connection.read(&mut bytes) {
            Ok(0) => {
                return Err(Error::environment(
                    "mpirun has closed its connection to this process (PMI_FD), which can be used once: has another program used it that \
                     was started before, or by, this one?",
                ));
            }
            Ok(count) => line.extend_from_slice(&bytes[..count]),
            Err(error) if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock) => {}
            Err(error) => return Err(lost(error)),
        }
        if line.len() > LINE_LIMIT {
            return Err(Error::protocol(format!("mpirun's answer is longer than {LINE_LIMIT} bytes")));
        }
    }
    request.answer(&String::from_utf8_lossy(&line))
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::sync::Barrier;
    use std::thread::scope;

    use super::*;

    /// A launcher's end for one of `ranks` processes, which share `space`.
    fn serve(end: UnixStream, space: &Mutex<String>, barrier: &Barrier) {
        let mut lines = BufReader::new(end.try_clone().unwrap());
        let mut end = end;
        let mut line = String::new();
        while lines.read_line(&mut line).unwrap() > 0 {
            let answer = match line.split_ascii_whitespace().next().unwrap() {
                "cmd=init" => "cmd=response_to_init rc=0 pmi_version=1 pmi_subversion=1".to_owned(),
                "cmd=get_my_kvsname" => "cmd=my_kvsname kvsname=kvs_7".to_owned(),
                "cmd=put" => {
                    *space.lock() = line.trim_end().rsplit_once("value=").unwrap().1.to_owned();
                    "cmd=put_result rc=0 msg=success".to_owned()
                }
                "cmd=barrier_in" => {
                    barrier.wait();
                    "cmd=barrier_out".to_owned()
                }
                "cmd=get" => match space.lock().as_str() {
                    "" => "cmd=get_result rc=-1 msg=key_phalanx_not_found value=unknown".to_owned(),
                    value => format!("cmd=get_result rc=0 msg=success value={value}"),
                },
                "cmd=finalize" => "cmd=finalize_ack".to_owned(),
                other => panic!("{other}"),
            };
            // In two pieces, as a stream may bring it.
            let (first, rest) = answer.split_at(9);
            end.write_all(first.as_bytes()).unwrap();
            end.write_all(format!("{rest}\n").as_bytes()).unwrap();
            line.clear();
        }
    }

    #[test]
    fn all_ranks_learn_the_address_of_rank_0() {
        let own: SocketAddr = "10.0.0.1:40123".parse().unwrap();
        let (space, barrier) = (Mutex::new(String::new()), Barrier::new(3));
        scope(|scope| {
            let ranks: Vec<_> = (0..3)
                .map(|rank| {
                    let (near, far) = UnixStream::pair().unwrap();
                    let (space, barrier) = (&space, &barrier);
                    scope.spawn(move || serve(far, space, barrier));
                    let own = (rank == 0).then(|| own.to_string());
                    scope.spawn(move || {
                        exchange(near, own, Reminders::new(), Deadline::after(Duration::from_secs(20)))
                    })
                })
                .collect();
            for rank in ranks {
                assert_eq!(rank.join().unwrap().unwrap(), own);
            }
        });
    }

    #[test]
    fn the_others_hear_that_rank_0_has_no_address() {
        let (space, barrier) = (Mutex::new(String::new()), Barrier::new(2));
        scope(|scope| {
            let ranks = [0, 1].map(|rank| {
                let (near, far) = UnixStream::pair().unwrap();
                let (space, barrier) = (&space, &barrier);
                scope.spawn(move || serve(far, space, barrier));
                let own = (rank == 0).then(|| Err(Error::environment("its port is in use")));
                scope.spawn(move || {
                    agree(near, own, Reminders::new(), Deadline::after(Duration::from_secs(20))).map(|_| ())
                })
            });
            let [first, second] = ranks.map(|rank| rank.join().unwrap().unwrap_err().to_string());
            assert!(first.contains("its port is in use"), "{first}");
            assert!(second.contains("rank 0 has no address"), "{second}");
        });
    }

    #[test]
    fn rank_0_tells_the_address_at_which_it_listens() {
        let told = |bind: &str, is_one_host| own_address(None, 0, Some(bind.parse().unwrap()), is_one_host);
        assert_eq!(told("127.0.0.2", true).unwrap().0.ip().to_string(), "127.0.0.2");
        assert_eq!(told("0.0.0.0", true).unwrap().0.ip().to_string(), "127.0.0.1");
        let error = told("127.0.0.1", false).unwrap_err();
        assert!(error.to_string().contains("PHALANX_BIND"), "{error}");
    }

    #[test]
    fn a_missing_rank_a_silent_and_a_gone_launcher_are_named() {
        // A barrier at which nobody else comes, so that the launcher does not answer.
        let (near, far) = UnixStream::pair().unwrap();
        let silent = std::thread::spawn(move || {
            let mut lines = BufReader::new(far.try_clone().unwrap()).lines();
            for answer in
                ["cmd=response_to_init rc=0\n", "cmd=my_kvsname kvsname=k\n", "", "cmd=finalize_ack\n"]
            {
                lines.next().unwrap().unwrap();
                (&far).write_all(answer.as_bytes()).unwrap();
            }
        });
        let error =
            exchange(near, None, Reminders::new(), Deadline::after(Duration::from_secs(2))).unwrap_err();
        assert!(error.is_timeout() && error.to_string().contains("PMI's barrier"), "{error}");
        // It was told that this process leaves.
        silent.join().unwrap();

        let (near, far) = UnixStream::pair().unwrap();
        far.shutdown(std::net::Shutdown::Write).unwrap();
        let error =
            exchange(near, None, Reminders::new(), Deadline::after(Duration::from_secs(5))).unwrap_err();
        assert!(error.is_environment() && error.to_string().contains("can be used once"), "{error}");

        let (near, mut far) = UnixStream::pair().unwrap();
        far.write_all(&[b'x'; 2 * LINE_LIMIT]).unwrap();
        let error =
            exchange(near, None, Reminders::new(), Deadline::after(Duration::from_secs(5))).unwrap_err();
        assert!(error.to_string().contains("longer than"), "{error}");
    }

    #[test]
    fn a_socket_of_this_process_is_no_connection_to_a_launcher() {
        use std::os::fd::AsRawFd;
        let (near, _far) = UnixStream::pair().unwrap();
        for descriptor in [near.as_raw_fd(), -1] {
            let error = connection(descriptor).unwrap_err();
            assert!(error.is_environment() && error.to_string().contains("PMI_FD="), "{error}");
        }
    }
}
