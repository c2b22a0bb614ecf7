//! Requests to etcd's v3 API through its JSON gateway, which every member serves:
//! <https://etcd.io/docs/current/dev-guide/api_grpc_gateway/>.
//!
//! The full client, etcd-client, brings tonic, prost and hyper, some 85 crates, for a few requests a second. ureq
//! without TLS is eight. Still etcd is a feature, on in the command and off in the library.
//!
//! A client that waits for a key asks again after a delay of 100 ms at most: a watch would be a stream without end, for
//! rare news.

use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;

use crate::deadline::{Backoff, Deadline};
use crate::error::{Error, Result};
use crate::interrupt;
use crate::store::tcp::resolve_in_order;

/// By default etcd accepts 1.5 MiB in a request, and base64 makes 4 bytes of 3.
const MAX_ANSWER: u64 = 16 * 1024 * 1024;
/// How long one member may take to answer before the next is asked.
const TIMEOUT: Duration = Duration::from_secs(2);
/// The pause between two rounds of all members grows from the first to the second: a cluster that has just come back, or has too much to do, is
/// asked by all launchers of a job.
const PAUSES: (Duration, Duration) = (Duration::from_millis(50), Duration::from_millis(500));

/// The members of an etcd cluster.
#[derive(Debug)]
pub(super) struct Gateway {
    members: Vec<String>,
    /// The member to ask first: the one that answered last, or the one after it if it has become silent.
    current: AtomicUsize,
    agent: ureq::Agent,
}

/// Why a member has not carried out a request.
#[derive(Debug)]
pub(super) enum Refused {
    /// It does not answer, or refuses for a reason that passes. `was_heard`: it may have carried out the request.
    Silent { cause: io::Error, was_heard: bool },
    /// It returned an error.
    Error(String),
    /// None has answered, and this thread's check has ended the wait.
    Ended(Error),
}

impl Gateway {
    /// `endpoints` is a list, `host:port,host:port`.
    pub(super) fn new(endpoints: &str) -> Result<Self> {
        let mut members = Vec::new();
        for endpoint in endpoints.split(',').map(str::trim).filter(|endpoint| !endpoint.is_empty()) {
            // No part of it is shown: a password may be there.
            if endpoint.contains('@') {
                return Err(Error::invalid_argument("an end point of etcd has a user or a password in it").with_remedy(
                    "write host:port[,host:port], and use an etcd without users and roles, or a proxy on this host that logs in",
                ));
            }
            let member = endpoint.strip_prefix("http://").unwrap_or(endpoint).trim_end_matches('/');
            if member.contains("://") || member.contains('/') {
                let cause = format!("{endpoint:?} is not an end point of etcd");
                return Err(Error::invalid_argument(cause).with_remedy(
                    "write host:port[,host:port]; TLS to etcd is not supported: let a proxy on this host do it",
                ));
            }
            let has_port = member.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
            members.push(if has_port { member.to_owned() } else { format!("{member}:2379") });
        }
        if members.is_empty() {
            return Err(Error::invalid_argument("no end point of etcd is given")
                .with_remedy("--rdzv-endpoint host:2379[,host:2379]"));
        }
        let agent = ureq::Agent::config_builder()
            // Requests to etcd do not go through a web proxy.
            .proxy(None)
            .http_status_as_error(false)
            .build()
            .into();
        Ok(Self { members, current: AtomicUsize::new(0), agent })
    }

    /// The members, as errors name them.
    pub(super) fn names(&self) -> String {
        self.members.join(",")
    }

    /// The address of this host in the network that leads to etcd.
    pub(super) fn local_address(&self, deadline: Deadline) -> Option<IpAddr> {
        // Its failure is no error, so that of this thread's check is left for the next wait.
        let look_up = |member: &String| resolve_in_order(member, deadline.at_most(TIMEOUT)).ok();
        let resolve = |member: &String| interrupt::undisturbed(|| look_up(member));
        let target: SocketAddr =
            self.members.iter().find_map(|member| resolve(member)?.into_iter().next())?;
        let any: IpAddr = if target.is_ipv4() { [0; 4].into() } else { [0_u16; 8].into() };
        // Nothing is sent: the kernel only looks up the route.
        let socket = UdpSocket::bind((any, 0)).ok()?;
        socket.connect(target).ok()?;
        socket.local_addr().ok().map(|address| address.ip())
    }

    /// Asks one member after the other until one answers. A request that must not be carried out twice is repeated only
    /// if no member can have received it.
    pub(super) fn ask(
        &self,
        path: &str,
        request: &Value,
        may_repeat: bool,
        deadline: Deadline,
    ) -> Result<Value, Refused> {
        let body = request.to_string();
        let mut backoff = Backoff::new(PAUSES, deadline);
        loop {
            let first = self.current.load(Ordering::Relaxed);
            let mut last = None;
            for turn in 0..self.members.len() {
                let member = (first + turn) % self.members.len();
                let answer =
                    self.ask_one(&self.members[member], path, &body, deadline.remaining().min(TIMEOUT));
                // Also if no other is asked now, or there is no time left for it: the next request must not wait for the same one.
                let is_silent = matches!(answer, Err(Refused::Silent { .. }));
                let next = if is_silent { (member + 1) % self.members.len() } else { member };
                self.current.store(next, Ordering::Relaxed);
                match answer {
                    Err(Refused::Silent { cause, was_heard }) if may_repeat || !was_heard => {
                        last = Some(cause)
                    }
                    answer => return answer,
                }
            }
            interrupt::check().map_err(Refused::Ended)?;
            if !backoff.pause() {
                let cause = last.unwrap_or_else(|| io::ErrorKind::TimedOut.into());
                return Err(Refused::Silent { cause, was_heard: false });
            }
        }
    }

    fn ask_one(&self, member: &str, path: &str, body: &str, timeout: Duration) -> Result<Value, Refused> {
        let silent = |error: ureq::Error| {
            let was_heard = !matches!(error, ureq::Error::HostNotFound | ureq::Error::ConnectionFailed)
                && !matches!(&error, ureq::Error::Io(error) if error.kind() == io::ErrorKind::ConnectionRefused);
            Refused::Silent { cause: error.into_io(), was_heard }
        };
        let request = self.agent.post(format!("http://{member}/v3/{path}"));
        // A time-out of zero would mean none.
        let timeout = timeout.max(Duration::from_millis(1));
        let request = request.config().timeout_global(Some(timeout)).build();
        let mut answer = request.header("content-type", "application/json").send(body).map_err(silent)?;
        let status = answer.status();
        let text = answer.body_mut().with_config().limit(MAX_ANSWER).read_to_string().map_err(silent)?;
        let value: Value = serde_json::from_str(&text).map_err(|_| {
            let refusal =
                format!("{status}, and no answer of etcd's; is {member} an etcd of version 3.4 or later?");
            match status.as_u16() {
                // What a proxy says that reaches no member.
                502..=504 => Refused::Silent { cause: io::Error::other(refusal), was_heard: true },
                _ => Refused::Error(refusal),
            }
        })?;
        if status.is_success() {
            return Ok(value);
        }
        let said = value["message"].as_str().or(value["error"].as_str()).unwrap_or("no reason given");
        let refusal = format!("{said} ({status})");
        match passing(value["code"].as_u64(), said) {
            Some(was_heard) => Err(Refused::Silent { cause: io::Error::other(refusal), was_heard }),
            None => Err(Refused::Error(refusal)),
        }
    }
}

/// Whether what a member has said passes, as while the members choose a leader. Then also whether the request may have been carried out.
fn passing(code: Option<u64>, said: &str) -> Option<bool> {
    /// gRPC's UNAVAILABLE: the leader has changed, or has not answered the member in time.
    const UNAVAILABLE: u64 = 14;
    const NOT_CARRIED_OUT: [&str; 3] = ["too many requests", "no leader", "proposal dropped"];
    if NOT_CARRIED_OUT.iter().any(|refusal| said.contains(refusal)) {
        return Some(false);
    }
    (code == Some(UNAVAILABLE)).then_some(true)
}

/// Bytes in the gateway's encoding.
pub(super) fn encode(bytes: &[u8]) -> String {
    STANDARD.encode(bytes)
}

/// The gateway omits empty values.
pub(super) fn decode(value: &Value) -> Option<Vec<u8>> {
    match value {
        Value::Null => Some(Vec::new()),
        Value::String(text) => STANDARD.decode(text).ok(),
        _ => None,
    }
}

/// 64-bit numbers are text, and 0 is omitted.
pub(super) fn number(value: &Value) -> Option<i64> {
    match value {
        Value::Null => Some(0),
        Value::String(text) => text.parse().ok(),
        value => value.as_i64(),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::sync::Arc;

    use super::*;
    use crate::interrupt::interruptible;

    type Answer = (&'static str, &'static str);

    const LEADER_CHANGED: Answer =
        ("503 Service Unavailable", r#"{"code":14,"message":"etcdserver: leader changed"}"#);
    const TOO_MANY: Answer =
        ("429 Too Many Requests", r#"{"code":8,"message":"etcdserver: too many requests"}"#);
    const DROPPED: Answer = ("500 Internal Server Error", r#"{"code":2,"message":"raft proposal dropped"}"#);
    const PROXY: Answer = ("502 Bad Gateway", "<html>no member answers</html>");
    const FULL: Answer =
        ("429 Too Many Requests", r#"{"code":8,"message":"etcdserver: mvcc: database space exceeded"}"#);
    const DONE: Answer = ("200 OK", r#"{"count":"1"}"#);

    /// A member that gives these answers one after the other, and the last one for ever.
    fn member(answers: &'static [Answer]) -> Gateway {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let gateway = Gateway::new(&listener.local_addr().unwrap().to_string()).unwrap();
        std::thread::spawn(move || {
            let last = answers.last().unwrap();
            for answer in answers.iter().chain(std::iter::repeat(last)) {
                // On a slow machine the client may have gone.
                let _ = give(listener.accept().unwrap().0, *answer);
            }
        });
        gateway
    }

    fn give(client: TcpStream, (status, body): Answer) -> io::Result<()> {
        let mut request = BufReader::new(client);
        let mut length = 0;
        loop {
            let mut line = String::new();
            request.read_line(&mut line)?;
            if line.trim().is_empty() {
                break;
            }
            if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
                length = value.trim().parse().unwrap();
            }
        }
        request.read_exact(&mut vec![0; length])?;
        let length = body.len();
        write!(
            request.get_mut(),
            "HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\
             connection: close\r\n\r\n{body}"
        )
    }

    fn asked(answers: &'static [Answer], may_repeat: bool) -> Result<Value, Refused> {
        let deadline = Deadline::after(Duration::from_secs(60));
        member(answers).ask("kv/range", &Value::Null, may_repeat, deadline)
    }

    #[test]
    fn a_refusal_that_passes_is_outwaited() {
        let answer = asked(&[LEADER_CHANGED, TOO_MANY, DROPPED, PROXY, DONE], true).unwrap();
        assert_eq!(number(&answer["count"]), Some(1));
        // What must not be carried out twice is repeated only if it was not carried out.
        assert!(asked(&[TOO_MANY, DROPPED, DONE], false).is_ok());
        match asked(&[LEADER_CHANGED, DONE], false) {
            Err(Refused::Silent { cause, was_heard: true }) => {
                assert!(cause.to_string().contains("leader changed (503"), "{cause}");
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn members_that_refuse_are_asked_ever_less_often() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let gateway = Gateway::new(&listener.local_addr().unwrap().to_string()).unwrap();
        let asked = Arc::<AtomicUsize>::default();
        let counter = Arc::clone(&asked);
        std::thread::spawn(move || {
            for client in listener.incoming() {
                counter.fetch_add(1, Ordering::Relaxed);
                let _ = give(client.unwrap(), TOO_MANY);
            }
        });
        let deadline = Deadline::after(Duration::from_secs(3));
        gateway.ask("kv/range", &Value::Null, true, deadline).unwrap_err();
        // Every 50 ms it would be sixty times.
        let asked = asked.load(Ordering::Relaxed);
        assert!((1..=20).contains(&asked), "{asked}");
    }

    #[test]
    fn a_thread_makes_its_check_while_no_member_answers() {
        match interruptible(|| Err(Error::aborted("enough")), || asked(&[TOO_MANY], true)) {
            Err(Refused::Ended(error)) => assert!(error.is_aborted(), "{error}"),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_refusal_that_stays_is_an_error_at_once() {
        match asked(&[FULL, DONE], true) {
            Err(Refused::Error(said)) => assert!(said.contains("space exceeded (429"), "{said}"),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_member_that_has_become_silent_is_not_the_first_to_be_asked_again() {
        // Who connects gets no answer.
        let silent = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let answers = member(&[DONE]).names();
        let gateway = Gateway::new(&format!("{},{answers}", silent.local_addr().unwrap())).unwrap();
        let ask = |milliseconds| {
            let deadline = Deadline::after(Duration::from_millis(milliseconds));
            gateway.ask("kv/deleterange", &Value::Null, false, deadline)
        };
        // It may have carried this out, so no other is asked.
        let refused = ask(200).unwrap_err();
        assert!(matches!(refused, Refused::Silent { was_heard: true, .. }), "{refused:?}");
        ask(60_000).unwrap();
    }

    #[test]
    fn end_points_are_a_list_of_hosts() {
        let members = |text: &str| Gateway::new(text).map(|gateway| gateway.names());
        assert_eq!(members("a, http://b:1/,[::1]:3").unwrap(), "a:2379,b:1,[::1]:3");
        for bad in ["", ",", "https://a:1", "http://a:1/path"] {
            assert!(members(bad).is_err(), "{bad}");
        }
        for secret in ["http://user:pass@a:1", "https://user:pass@a", "b,user:pass@a"] {
            let error = members(secret).unwrap_err().to_string();
            assert!(error.contains("a password") && !error.contains("pass@"), "{error}");
        }
    }

    #[test]
    fn nobody_who_answers_is_a_silence_that_ends() {
        let gateway = Gateway::new("127.0.0.1:1").unwrap();
        let deadline = Deadline::after(Duration::from_millis(200));
        let refused = gateway.ask("kv/range", &Value::Null, true, deadline).unwrap_err();
        assert!(matches!(refused, Refused::Silent { was_heard: false, .. }), "{refused:?}");
        // What needs no look-up is known, however late it is.
        assert!(gateway.local_address(deadline).is_some_and(|address| address.is_loopback()));
    }
}
