//! The options of a job on several nodes.

use std::net::IpAddr;
use std::str::FromStr;
use std::time::Duration;

use clap::{Args, ValueEnum};
use phalanx::launch::{Cluster, Hosting};

/// torchrun's ports.
const STATIC_PORT: u16 = 29500;
const C10D_PORT: u16 = 29400;

#[derive(Args, Debug)]
#[command(next_help_heading = "Several nodes, a command on each")]
pub(crate) struct NodeOptions {
    /// The number of machines, or MIN:MAX: nodes may then come and go within these limits [default: 1, or, within a Slurm job, all of
    /// its nodes]
    #[arg(long, value_name = "N", env = "PET_NNODES", hide_env_values = true)]
    pub(crate) nnodes: Option<Nnodes>,

    /// This machine's rank among the nodes, from 0 (with `static`) [default: 0]
    #[arg(long, alias = "node_rank", value_name = "N", env = "PET_NODE_RANK", hide_env_values = true)]
    pub(crate) node_rank: Option<u32>,

    /// The address of node 0, at which its store listens [default: 127.0.0.1]
    #[arg(long, alias = "master_addr", value_name = "HOST", env = "PET_MASTER_ADDR", hide_env_values = true)]
    pub(crate) master_addr: Option<String>,

    /// The port of that store [default: a free one on one node, 29500 on several]
    #[arg(long, alias = "master_port", value_name = "PORT", env = "PET_MASTER_PORT", hide_env_values = true)]
    pub(crate) master_port: Option<u16>,

    /// Where the nodes' rendezvous is. `static`: in a store of node 0. `c10d`: in a store of the node whose address the end
    /// point is. `etcd`: in an etcd cluster. `file`: in a file on a shared disk. With the last two any node may be lost [default: static]
    #[arg(
        long,
        alias = "rdzv_backend",
        value_name = "NAME",
        env = "PET_RDZV_BACKEND",
        hide_env_values = true
    )]
    pub(crate) rdzv_backend: Option<Backend>,

    /// The rendezvous end point, HOST[:PORT], instead of --master-addr and --master-port; for etcd HOST[:PORT],..; for
    /// `file` a path
    #[arg(
        long,
        alias = "rdzv_endpoint",
        value_name = "HOST:PORT",
        env = "PET_RDZV_ENDPOINT",
        hide_env_values = true
    )]
    pub(crate) rdzv_endpoint: Option<String>,

    /// Settings of the rendezvous: join_timeout=600, last_call_timeout=30, keep_alive_interval=1, keep_alive_max_attempt=12 (seconds
    /// and times), is_host=true
    #[arg(
        long,
        alias = "rdzv_conf",
        value_name = "KEY=VALUE,..",
        env = "PET_RDZV_CONF",
        hide_env_values = true,
        default_value = "",
        hide_default_value = true
    )]
    pub(crate) rdzv_conf: Conf,

    /// The address at which the other nodes reach this one, with `etcd` and `file` [default: that of the interface to etcd, or that
    /// GLOO_SOCKET_IFNAME names, or of this host's name or default route]. `localhost` says that all nodes are on this host
    #[arg(long, alias = "local_addr", value_name = "HOST", env = "PET_LOCAL_ADDR", hide_env_values = true)]
    pub(crate) local_addr: Option<String>,

    /// The address at which this node's stores listen, if it serves any and it is not the one at which others reach them. 0.0.0.0
    /// opens them to every network of this machine: then give the job a key (--job-key-file)
    #[arg(long, value_name = "ADDRESS", env = "PHALANX_BIND", hide_env_values = true)]
    pub(crate) bind: Option<IpAddr>,
}

/// The smallest and the largest number of nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Nnodes {
    pub(crate) min: u32,
    pub(crate) max: u32,
}

impl FromStr for Nnodes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |text: &str| text.parse().map_err(|_| format!("{text:?} is not a number"));
        let (min, max) = match text.split_once(':') {
            Some((min, max)) => (number(min)?, number(max)?),
            None => (number(text)?, number(text)?),
        };
        if min == 0 || min > max {
            return Err("give a number from 1, or MIN:MAX".to_owned());
        }
        Ok(Self { min, max })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Backend {
    Static,
    C10d,
    #[cfg(feature = "etcd")]
    #[value(alias = "etcd-v2")]
    Etcd,
    File,
}

/// The keys of `--rdzv-conf`.
const CONF: [&str; 6] = [
    "join_timeout",
    "timeout",
    "last_call_timeout",
    "keep_alive_interval",
    "keep_alive_max_attempt",
    "is_host",
];
/// Settings of torchrun that have no effect here: only PyTorch's store uses them.
const CONF_WITHOUT_EFFECT: [&str; 7] =
    ["close_timeout", "heartbeat_timeout", "read_timeout", "store_type", "use_libuv", "rank", "etcd_prefix"];
/// Settings of torchrun that ask for an encryption which is not supported.
const CONF_OF_ETCDS_TLS: [&str; 7] =
    ["protocol", "cacert", "cert", "key", "ssl_cert", "ssl_cert_key", "ssl_protocol"];

/// `--rdzv-conf`, with the settings that are supported here.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Conf {
    join_timeout: Option<Duration>,
    last_call: Option<Duration>,
    keep_alive_interval: Option<Duration>,
    keep_alive_attempts: Option<u32>,
    is_host: Option<bool>,
    /// Keys that were given and have no effect.
    unused: Vec<String>,
}

impl Conf {
    /// A warning about keys that have no effect.
    pub(crate) fn note(&self) -> Option<String> {
        let has = if self.unused.len() == 1 { "has" } else { "have" };
        let unused = self.unused.join(", ");
        (!self.unused.is_empty()).then(|| {
            format!("--rdzv-conf: {unused} {has} no effect here: only torchrun's rendezvous and store use it")
        })
    }
}

impl FromStr for Conf {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut conf = Self::default();
        for pair in text.split(',').map(str::trim).filter(|pair| !pair.is_empty()) {
            let (key, value) = pair.split_once('=').ok_or_else(|| format!("{pair:?} is not KEY=VALUE"))?;
            let value = value.trim();
            let seconds = || crate::cli::seconds(value).map(Some).map_err(|error| format!("{key}: {error}"));
            // Nobody could join in no time, and nobody would be heard of.
            let some_seconds = || match seconds()? {
                Some(time) if time.is_zero() => Err(format!("{key}: give more than 0 seconds")),
                seconds => Ok(seconds),
            };
            match key.trim() {
                "join_timeout" | "timeout" => conf.join_timeout = some_seconds()?,
                "last_call_timeout" => conf.last_call = seconds()?,
                "keep_alive_interval" => conf.keep_alive_interval = some_seconds()?,
                "keep_alive_max_attempt" => match value.parse() {
                    Ok(0) => return Err(format!("{key}: give a number from 1")),
                    Ok(attempts) => conf.keep_alive_attempts = Some(attempts),
                    Err(_) => return Err(format!("{key}: it is not a number")),
                },
                "is_host" => match value.to_ascii_lowercase().as_str() {
                    "1" | "true" | "t" | "yes" | "y" => conf.is_host = Some(true),
                    "0" | "false" | "f" | "no" | "n" => conf.is_host = Some(false),
                    _ => return Err(format!("{key}: it is neither true nor false")),
                },
                key if CONF_WITHOUT_EFFECT.contains(&key) => conf.unused.push(key.to_owned()),
                key if CONF_OF_ETCDS_TLS.contains(&key) => {
                    return Err(format!("{key}: etcd is spoken to without TLS here"));
                }
                key => return Err(format!("there is no {key:?}; there are {}", CONF.join(", "))),
            }
        }
        Ok(conf)
    }
}

impl NodeOptions {
    pub(crate) fn nnodes(&self) -> Nnodes {
        self.nnodes.unwrap_or(Nnodes { min: 1, max: 1 })
    }

    fn backend(&self) -> Backend {
        self.rdzv_backend.unwrap_or(Backend::Static)
    }

    /// An error if this node's rank is none of the nodes': it would wait for the others in vain, or train in a world of its own. Only
    /// `static` uses the rank.
    pub(crate) fn check_node_rank(&self) -> Result<(), String> {
        let nodes = self.nnodes().max;
        let Some(rank) = self.node_rank.filter(|rank| *rank >= nodes && self.backend() == Backend::Static)
        else {
            return Ok(());
        };
        let variable = std::env::var("PET_NODE_RANK").is_ok_and(|value| value.parse() == Ok(rank));
        let given = if variable { format!("PET_NODE_RANK={rank}") } else { format!("--node-rank {rank}") };
        Err(match self.nnodes {
            None => format!("{given} says that there are several nodes: give their number, --nnodes N"),
            Some(_) => format!("{given} is not below the number of nodes, {nodes}: ranks begin with 0"),
        })
    }

    /// A note about addresses of which one node makes no use: what it serves is for its own workers.
    /// Variables may be those of all jobs.
    pub(crate) fn unused_alone(&self, is_set: impl Fn(&str) -> bool) -> Option<String> {
        let bind = self.bind.is_some() && !is_set("PHALANX_BIND");
        let local_addr = self.local_addr.is_some() && !is_set("PET_LOCAL_ADDR");
        let (verb, options) = match (bind, local_addr) {
            (false, false) => return None,
            (true, false) => ("has", "--bind"),
            (false, true) => ("has", "--local-addr"),
            (true, true) => ("have", "--bind and --local-addr"),
        };
        (self.nnodes().max == 1).then(|| {
            format!("{options} {verb} no effect on one node: its store listens at --master-addr or --rdzv-endpoint, or else at 127.0.0.1")
        })
    }

    /// A note about a place to meet that goes behind `--rdzv-endpoint`. Variables may be those of all jobs.
    pub(crate) fn unused_beside_endpoint(&self, is_set: impl Fn(&str) -> bool) -> Option<String> {
        let endpoint = self.place_to_meet()?;
        // With `etcd` and `file` the only node of a job serves the workers' store at --master-addr.
        let is_used = match self.backend() {
            Backend::Static | Backend::C10d => true,
            #[cfg(feature = "etcd")]
            Backend::Etcd => self.nnodes().max > 1,
            Backend::File => self.nnodes().max > 1,
        };
        let master_addr = self.master_addr.is_some() && !is_set("PET_MASTER_ADDR");
        let master_port = self.master_port.is_some() && !is_set("PET_MASTER_PORT");
        let (verb, options) = match (is_used && master_addr, is_used && master_port) {
            (false, false) => return None,
            (true, false) => ("has", "--master-addr"),
            (false, true) => ("has", "--master-port"),
            (true, true) => ("have", "--master-addr and --master-port"),
        };
        Some(format!("{options} {verb} no effect: --rdzv-endpoint {endpoint} says where the nodes meet"))
    }

    /// Whether they say which nodes there are, or where they meet.
    pub(crate) fn are_given(&self) -> bool {
        self.nnodes.is_some()
            || self.node_rank.is_some()
            || self.master_addr.is_some()
            || self.rdzv_endpoint.is_some()
    }

    /// The address and the port, from whichever option gave them.
    pub(crate) fn endpoint(&self) -> Result<(Option<String>, Option<u16>), String> {
        let endpoint = match self.backend() {
            Backend::Static | Backend::C10d => self.place_to_meet(),
            #[cfg(feature = "etcd")]
            Backend::Etcd => None,
            Backend::File => None,
        };
        let Some(endpoint) = endpoint else {
            return Ok((self.master_addr.clone(), self.master_port));
        };
        // A bare IPv6 address has colons, but no port. That of one link has its interface behind it: fe80::1%eth0.
        let (address, interface) = endpoint.split_once('%').unwrap_or((endpoint, ""));
        let bare = address.parse::<IpAddr>().is_ok() && !interface.contains(':');
        match endpoint.rsplit_once(':').filter(|(_, port)| !bare && !port.ends_with(']')) {
            Some((host, port)) => {
                let port = port.parse().map_err(|_| format!("--rdzv-endpoint: {port:?} is not a port"))?;
                Ok((Some(host.to_owned()), Some(port)))
            }
            None => Ok((Some(endpoint.to_owned()), None)),
        }
    }

    fn place_to_meet(&self) -> Option<&str> {
        self.rdzv_endpoint.as_deref().map(str::trim).filter(|text| !text.is_empty())
    }

    /// The nodes of the job, if there may be several.
    pub(crate) fn cluster(&self) -> Result<Option<Cluster>, String> {
        let Nnodes { min, max } = self.nnodes();
        if max == 1 {
            return Ok(None);
        }
        let (host, port) = self.endpoint()?;
        let needed = || self.place_to_meet().ok_or("this --rdzv-backend needs --rdzv-endpoint");
        let cluster = match self.backend() {
            Backend::Static => {
                let node_rank = self.node_rank.unwrap_or(0);
                let host = host.unwrap_or_else(|| "127.0.0.1".to_owned());
                let hosting = if node_rank == 0 { Hosting::Serve } else { Hosting::Connect };
                Cluster::new(min, max, host, port.unwrap_or(STATIC_PORT))
                    .map(|cluster| cluster.node_rank(node_rank).hosting(hosting))
            }
            Backend::C10d => {
                let host = host.ok_or("--rdzv-backend c10d needs --rdzv-endpoint")?;
                let hosting = match self.rdzv_conf.is_host {
                    Some(true) => Hosting::Serve,
                    Some(false) => Hosting::Connect,
                    None => Hosting::ByAddress,
                };
                Cluster::new(min, max, host, port.unwrap_or(C10D_PORT))
                    .map(|cluster| cluster.hosting(hosting))
            }
            #[cfg(feature = "etcd")]
            Backend::Etcd => Cluster::etcd(min, max, needed()?),
            Backend::File => Cluster::file(min, max, needed()?),
        };
        let cluster = cluster.map_err(|error| error.to_string())?;
        Ok(Some(self.shape(cluster)))
    }

    /// `cluster` with the given time-outs and addresses.
    pub(crate) fn shape(&self, cluster: Cluster) -> Cluster {
        let conf = &self.rdzv_conf;
        let interval = conf.keep_alive_interval.unwrap_or(Duration::from_secs(1));
        let cluster = cluster.keep_alive(interval, conf.keep_alive_attempts);
        let cluster = conf.join_timeout.into_iter().fold(cluster, Cluster::join_timeout);
        let cluster = conf.last_call.into_iter().fold(cluster, Cluster::last_call);
        let cluster = self.local_addr.iter().fold(cluster, Cluster::local_addr);
        self.bind.into_iter().fold(cluster, Cluster::bind)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn node_counts_are_numbers_or_ranges() {
        assert_eq!("3".parse(), Ok(Nnodes { min: 3, max: 3 }));
        assert_eq!("1:4".parse(), Ok(Nnodes { min: 1, max: 4 }));
        for bad in ["", "0", "0:2", "3:2", "1:2:3", "x", "-1"] {
            assert!(bad.parse::<Nnodes>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_node_has_a_rank_below_their_number() {
        let check = |nodes: Option<u32>, node_rank: u32, rdzv_backend: Option<Backend>| {
            let options = NodeOptions {
                nnodes: nodes.map(|max| Nnodes { min: 1, max }),
                node_rank: Some(node_rank),
                master_addr: None,
                master_port: None,
                rdzv_backend,
                rdzv_endpoint: None,
                rdzv_conf: Conf::default(),
                local_addr: None,
                bind: None,
            };
            options.check_node_rank()
        };
        assert_eq!(check(Some(2), 1, None), Ok(()));
        assert_eq!(check(None, 0, None), Ok(()));
        // As with torchrun, whose other rendezvous give ranks themselves.
        assert_eq!(check(Some(2), 2, Some(Backend::C10d)), Ok(()));
        assert!(check(Some(2), 2, None).unwrap_err().contains("not below the number of nodes, 2"));
        assert!(check(None, 1, Some(Backend::Static)).unwrap_err().contains("give their number, --nnodes N"));
    }

    #[test]
    fn addresses_that_one_node_does_not_use_are_said() {
        let note = |nodes: u32, bind: Option<&str>, local_addr: Option<&str>| {
            let options = NodeOptions {
                nnodes: Some(Nnodes { min: 1, max: nodes }),
                node_rank: None,
                master_addr: None,
                master_port: None,
                rdzv_backend: None,
                rdzv_endpoint: None,
                rdzv_conf: Conf::default(),
                local_addr: local_addr.map(str::to_owned),
                bind: bind.map(|address| address.parse().unwrap()),
            };
            options.unused_alone(|_| false)
        };
        assert_eq!((note(1, None, None), note(2, Some("0.0.0.0"), Some("node7"))), (None, None));
        assert!(note(1, Some("0.0.0.0"), None).unwrap().starts_with("--bind has no effect on one node"));
        assert!(
            note(1, Some("::"), Some("node7")).unwrap().starts_with("--bind and --local-addr have no effect")
        );
    }

    #[test]
    fn a_second_place_to_meet_is_said_to_have_no_effect() {
        let note = |nodes: u32, rdzv_backend: Option<Backend>, endpoint: Option<&str>, is_variable: bool| {
            let options = NodeOptions {
                nnodes: Some(Nnodes { min: 1, max: nodes }),
                node_rank: None,
                master_addr: None,
                master_port: Some(7),
                rdzv_backend,
                rdzv_endpoint: endpoint.map(str::to_owned),
                rdzv_conf: Conf::default(),
                local_addr: None,
                bind: None,
            };
            options.unused_beside_endpoint(|_| is_variable)
        };
        let said = note(2, Some(Backend::C10d), Some("node7"), false).unwrap();
        assert_eq!(said, "--master-port has no effect: --rdzv-endpoint node7 says where the nodes meet");
        assert!(note(1, None, Some("node7"), false).is_some());
        assert!(note(2, Some(Backend::File), Some("/shared/x"), false).is_some());
        for unsaid in [
            note(2, None, None, false),
            note(2, None, Some(" "), false),
            note(2, None, Some("node7"), true),
            note(1, Some(Backend::File), Some("/shared/x"), false),
        ] {
            assert_eq!(unsaid, None);
        }
    }

    #[test]
    fn torchruns_settings_are_understood() {
        let conf: Conf =
            "join_timeout=60, keep_alive_interval=5,read_timeout=9,is_host=True".parse().unwrap();
        assert_eq!((conf.join_timeout, conf.is_host), (Some(Duration::from_secs(60)), Some(true)));
        assert!(conf.note().unwrap().contains("read_timeout has no effect"));
        assert_eq!("timeout=3".parse::<Conf>().unwrap().note(), None);
        let unknown = "join_time=1".parse::<Conf>().unwrap_err();
        assert!(unknown.contains("join_timeout") && unknown.contains("is_host"), "{unknown}");
        assert!("ssl_cert=x".parse::<Conf>().unwrap_err().contains("without TLS"));
        for bad in ["x", "x=1", "join_timeout=soon", "is_host=2", "keep_alive_max_attempt=-1"] {
            assert!(bad.parse::<Conf>().is_err(), "{bad}");
        }
        assert_eq!("last_call_timeout=0".parse::<Conf>().unwrap().last_call, Some(Duration::ZERO));
        for none in ["join_timeout=0", "timeout=0", "keep_alive_interval=0", "keep_alive_max_attempt=0"] {
            let refused = none.parse::<Conf>().unwrap_err();
            assert!(refused.contains(": give "), "{refused}");
        }
    }

    #[test]
    fn an_end_point_may_lack_its_port() {
        let endpoint = |text: &str| {
            let options = NodeOptions {
                nnodes: Some(Nnodes { min: 2, max: 2 }),
                node_rank: None,
                master_addr: None,
                master_port: None,
                rdzv_backend: Some(Backend::C10d),
                rdzv_endpoint: Some(text.to_owned()),
                rdzv_conf: Conf::default(),
                local_addr: None,
                bind: None,
            };
            options.endpoint()
        };
        assert_eq!(endpoint("node7"), Ok((Some("node7".into()), None)));
        assert_eq!(endpoint("node7:1"), Ok((Some("node7".into()), Some(1))));
        assert_eq!(endpoint("::1"), Ok((Some("::1".into()), None)));
        assert_eq!(endpoint("[::1]:1"), Ok((Some("[::1]".into()), Some(1))));
        assert_eq!(endpoint("fe80::1%eth0"), Ok((Some("fe80::1%eth0".into()), None)));
        assert_eq!(endpoint("[fe80::1%eth0]:1"), Ok((Some("[fe80::1%eth0]".into()), Some(1))));
        assert!(endpoint("node7:x").is_err());
    }
}
