//! Two hosts of one machine: network namespaces, joined by a cable that can be cut in several ways.

use std::process::Command;

use super::world::{Place, World};

pub const FIRST: &str = "10.98.0.1";
const SECOND: &str = "10.98.0.2";
const PORT: u16 = 29500;
/// An address that no card has: what is sent there arrives nowhere.
const NOBODY: &str = "02:00:00:00:00:99";

/// The namespaces, until it is dropped.
pub struct Network(String);

impl Network {
    /// Needs root and `ip`; where they are not, the test that asks for it has failed, since it tested nothing.
    pub fn new() -> Self {
        let network = Self::without_loopback();
        for side in ["a", "b"] {
            let side = network.side(side);
            ip(&format!("-n {side} link set lo up"));
        }
        network
    }

    /// The loopback of a new namespace is down.
    pub fn without_loopback() -> Self {
        let name = format!("phf{}", std::process::id());
        let (a, b) = (format!("{name}a"), format!("{name}b"));
        let network = Self(name);
        ip(&format!("netns add {a}"));
        ip(&format!("netns add {b}"));
        ip(&format!("link add {a} netns {a} type veth peer name {b} netns {b}"));
        for (side, address) in [(&a, FIRST), (&b, SECOND)] {
            ip(&format!("-n {side} addr add {address}/24 dev {side}"));
            ip(&format!("-n {side} link set {side} up"));
        }
        network
    }

    /// Starts `world` ranks, the first half of them on the first host, where rank 0 serves the store.
    pub fn start(&self, scenario: &str, world: u32, variables: &[(&str, &str)]) -> World {
        let place = Place { address: FIRST, port: PORT, served_by_rank_0: true };
        let start = |rank| {
            let mut command = Command::new("ip");
            let side = if rank < world / 2 { "a" } else { "b" };
            command.args(["netns", "exec", &self.side(side)]).arg(std::env::current_exe().unwrap());
            place.rank(command, scenario, (rank, world), variables)
        };
        World { ranks: (0..world).map(start).collect(), port: PORT, server: None, held: None }
    }

    /// Starts `world` ranks on the first host, which meet on its loopback.
    pub fn start_on_loopback(&self, scenario: &str, world: u32, variables: &[(&str, &str)]) -> World {
        let side = self.side("a");
        let place = Place { address: "127.0.0.1", port: PORT, served_by_rank_0: true };
        let start = |rank| {
            let mut command = Command::new("ip");
            command.args(["netns", "exec", &side]).arg(std::env::current_exe().unwrap());
            place.rank(command, scenario, (rank, world), variables)
        };
        World { ranks: (0..world).map(start).collect(), port: PORT, server: None, held: None }
    }

    /// Lets packets have at most so many bytes, as tunnels do.
    pub fn set_mtu(&self, bytes: u32) {
        for side in ["a", "b"] {
            let side = self.side(side);
            ip(&format!("-n {side} link set {side} mtu {bytes}"));
        }
    }

    /// Pulls the cable out.
    pub fn pull(&self) {
        let side = self.side("a");
        ip(&format!("-n {side} link set {side} down"));
    }

    /// Takes the first host's loopback down.
    pub fn pull_loopback(&self) {
        ip(&format!("-n {} link set lo down", self.side("a")));
    }

    /// Loses all that the first host sends, silently.
    pub fn lose_what_the_first_sends(&self) {
        let side = self.side("a");
        ip(&format!("-n {side} neigh replace {SECOND} lladdr {NOBODY} dev {side} nud permanent"));
    }

    /// Loses all that the second host sends, silently.
    pub fn lose_what_the_second_sends(&self) {
        let side = self.side("b");
        ip(&format!("-n {side} neigh replace {FIRST} lladdr {NOBODY} dev {side} nud permanent"));
    }

    /// Resets every connection between the two, as a firewall does that has lost its memory.
    pub fn reset(&self) {
        run(Command::new("ip").args(["netns", "exec", &self.side("a"), "ss", "-K", "dst", SECOND]));
    }

    fn side(&self, side: &str) -> String {
        format!("{}{side}", self.0)
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for side in ["a", "b"] {
            let _ = Command::new("ip").args(["netns", "del", &self.side(side)]).output();
        }
    }
}

fn ip(arguments: &str) {
    run(Command::new("ip").args(arguments.split(' ')));
}

pub fn run(command: &mut Command) {
    let output = command.output();
    let done = output.as_ref().is_ok_and(|output| output.status.success());
    assert!(done, "this test needs root and its tools: {command:?}: {output:?}");
}
