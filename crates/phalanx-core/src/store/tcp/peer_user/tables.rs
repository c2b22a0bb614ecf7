//! The kernel's tables of all connections. They may be long, so one reading answers all queries made by then.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::rc::Rc;

use tokio::sync::oneshot;
use tokio::task::spawn_local;

use super::Ends;
use crate::store::tcp::blocking::Blocking;

/// The tables of this thread's network namespace.
const TABLES: [&str; 2] = ["/proc/thread-self/net/tcp", "/proc/thread-self/net/tcp6"];
/// The only state in which a line's user is the socket's creator: half-open and closed sockets have 0.
const ESTABLISHED: &str = "01";

/// The waiting queries. However many there are, one thread reads the tables, one time after the other.
#[derive(Debug, Default)]
pub(super) struct Tables {
    asked: RefCell<Vec<(Ends, oneshot::Sender<Answer>)>>,
    is_read: Cell<bool>,
    blocking: Blocking,
    #[cfg(test)]
    readings: Cell<usize>,
}

type Answer = io::Result<Option<u32>>;

impl Tables {
    pub async fn user_of(self: &Rc<Self>, ends: Ends) -> Answer {
        let (answer, answered) = oneshot::channel();
        self.asked.borrow_mut().push((ends, answer));
        if !self.is_read.replace(true) {
            spawn_local(Rc::clone(self).answer());
        }
        answered.await.map_err(io::Error::other)?
    }

    async fn answer(self: Rc<Self>) {
        loop {
            let mut asked = self.asked.take();
            // Queries whose time is over are no longer waiting.
            asked.retain(|(_, answer)| !answer.is_closed());
            if asked.is_empty() {
                break self.is_read.set(false);
            }
            #[cfg(test)]
            self.readings.update(|readings| readings + 1);
            let wanted: Vec<Ends> = asked.iter().map(|(ends, _)| *ends).collect();
            let read = self.blocking.run(move || users_of(&wanted)).await.and_then(|read| read);
            for (ends, answer) in asked {
                let _ = answer.send(match &read {
                    Ok(users) => Ok(users.get(&ends).copied()),
                    Err(error) => Err(io::Error::new(error.kind(), error.to_string())),
                });
            }
        }
    }
}

/// The users of those `wanted` sockets that are connected to these peers.
pub(super) fn users_of(wanted: &[Ends]) -> io::Result<HashMap<Ends, u32>> {
    let mut users: HashMap<Ends, Option<u32>> = wanted.iter().map(|ends| (*ends, None)).collect();
    for table in TABLES {
        let file = match File::open(table) {
            Ok(file) => file,
            // A kernel without IPv6.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(error),
        };
        for line in BufReader::with_capacity(16 << 10, file).lines() {
            if let Some((local, remote, user)) = parse(&line?)
                && let Some(wanted) = users.get_mut(&(local, remote))
            {
                *wanted = Some(user);
            }
        }
    }
    Ok(users.into_iter().filter_map(|(ends, user)| Some((ends, user?))).collect())
}

/// Parses an established connection: its local address, its remote address, and its user.
fn parse(line: &str) -> Option<(SocketAddr, SocketAddr, u32)> {
    // sl local_address rem_address st tx:rx tr:when retrnsmt uid ..
    let mut fields = line.split_ascii_whitespace().skip(1);
    let (local, remote) = (end(fields.next()?)?, end(fields.next()?)?);
    if fields.next()? != ESTABLISHED {
        return None;
    }
    Some((local, remote, fields.nth(3)?.parse().ok()?))
}

/// Parses `0100007F:1F90`: words of four bytes in this processor's byte order, and the port.
fn end(text: &str) -> Option<SocketAddr> {
    let (address, port) = text.split_once(':')?;
    let word = |text: &str| Some(u32::from_str_radix(text, 16).ok()?.to_ne_bytes());
    let ip: IpAddr = match address.len() {
        8 => Ipv4Addr::from(word(address)?).into(),
        32 => {
            let mut bytes = [0; 16];
            for (place, part) in bytes.chunks_exact_mut(4).enumerate() {
                part.copy_from_slice(&word(address.get(8 * place..8 * place + 8)?)?);
            }
            Ipv6Addr::from(bytes).to_canonical()
        }
        _ => return None,
    };
    Some(SocketAddr::new(ip, u16::from_str_radix(port, 16).ok()?))
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use proptest::prelude::*;
    use tokio::task::{JoinSet, LocalSet};

    use super::*;

    #[test]
    fn few_readings_answer_all_who_ask() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let there = (client.local_addr().unwrap(), client.peer_addr().unwrap());
        // There is no connection from there.
        let absent = (SocketAddr::new(there.0.ip(), 1), there.1);
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        LocalSet::new().block_on(&runtime, async {
            let tables = Rc::new(Tables::default());
            let mut asking = JoinSet::new();
            for number in 0..1000 {
                let (tables, ends) = (tables.clone(), if number % 2 == 0 { there } else { absent });
                asking.spawn_local(async move { (ends, tables.user_of(ends).await.unwrap()) });
            }
            while let Some(answer) = asking.join_next().await {
                let (ends, user) = answer.unwrap();
                assert_eq!(user, (ends == there).then(|| rustix::process::geteuid().as_raw()));
            }
            assert!(tables.readings.get() <= 2, "{}", tables.readings.get());
        });
    }

    #[test]
    fn lines_of_the_kernel_are_read() {
        let line =
            "   7: 0100007F:C350 0100007F:7350 01 00000000:00000000 00:00000000 00000000  1000        0 5 1";
        let at = |text: &str| text.parse().unwrap();
        if cfg!(target_endian = "little") {
            assert_eq!(parse(line), Some((at("127.0.0.1:50000"), at("127.0.0.1:29520"), 1000)));
            let mapped = line.replace("0100007F", "0000000000000000FFFF00000100007F");
            assert_eq!(parse(&mapped), parse(line));
        }
        // Half-open and closed sockets have 0 as the user.
        assert_eq!(parse(&line.replace(" 01 ", " 06 ")), None);
        assert_eq!(
            parse("  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid"),
            None
        );
    }

    proptest! {
        #[test]
        fn garbage_is_no_line(line in "[0-9A-F: é]{0,120}") {
            let _ = parse(&line);
        }
    }
}
