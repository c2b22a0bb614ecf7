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

use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::store::tcp::resolve_in_order;

/// By default etcd accepts 1.5 MiB in a request, and base64 makes 4 bytes of 3.
const MAX_ANSWER: u64 = 16 * 1024 * 1024;
/// How long one member may take to answer before the next is asked.
const TIMEOUT: Duration = Duration::from_secs(2);
/// The pause between two rounds of all members.
const RETRY_DELAY: Duration = Duration::from_millis(50);

/// The members of an etcd cluster.
#[derive(Debug)]
pub(super) struct Gateway {
    members: Vec<String>,
    /// The member that answered last.
    current: AtomicUsize,
    agent: ureq::Agent,
}

/// Why a member has not carried out a request.
#[derive(Debug)]
pub(super) enum Refused {
    /// It does not answer. `was_heard`: it may have received the request.
    Silent { cause: io::Error, was_heard: bool },
    /// It returned an error.
    Error(String),
}

impl Gateway {
    /// `endpoints` is a list, `host:port,host:port`.
    pub(super) fn new(endpoints: &str) -> Result<Self> {
        let mut members = Vec::new();
        for endpoint in endpoints.split(',').map(str::trim).filter(|endpoint| !endpoint.is_empty()) {
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
        let resolve = |member: &String| resolve_in_order(member, deadline.at_most(TIMEOUT)).ok();
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
        loop {
            let first = self.current.load(Ordering::Relaxed);
            let mut last = None;
            for turn in 0..self.members.len() {
                let member = (first + turn) % self.members.len();
                match self.ask_one(&self.members[member], path, &body, deadline.remaining().min(TIMEOUT)) {
                    Err(Refused::Silent { cause, was_heard }) if may_repeat || !was_heard => {
                        last = Some(cause)
                    }
                    answer => {
                        self.current.store(member, Ordering::Relaxed);
                        return answer;
                    }
                }
            }
            let pause = RETRY_DELAY.min(deadline.remaining());
            if pause.is_zero() {
                let cause = last.unwrap_or_else(|| io::ErrorKind::TimedOut.into());
                return Err(Refused::Silent { cause, was_heard: false });
            }
            std::thread::sleep(pause);
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
            Refused::Error(format!(
                "{status}, and no answer of etcd's; is {member} an etcd of version 3.4 or later?"
            ))
        })?;
        if status.is_success() {
            return Ok(value);
        }
        let said = value["message"].as_str().or(value["error"].as_str()).unwrap_or("no reason given");
        Err(Refused::Error(format!("{said} ({status})")))
    }
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
    use super::*;

    #[test]
    fn end_points_are_a_list_of_hosts() {
        let members = |text: &str| Gateway::new(text).map(|gateway| gateway.names());
        assert_eq!(members("a, http://b:1/,[::1]:3").unwrap(), "a:2379,b:1,[::1]:3");
        for bad in ["", ",", "https://a:1", "http://a:1/path"] {
            assert!(members(bad).is_err(), "{bad}");
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
