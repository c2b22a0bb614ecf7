//! A script that stands in for ssh, and runs what it is told to on this machine, as a login of its own would: in a session
//! of its own, elsewhere, with next to no environment.

use std::path::Path;
use std::process::Command;

use tempfile::TempDir;

use super::{bare, command, write_program};

/// Called as ssh is. Its arguments are kept, and hosts whose names begin with `bad` are what OpenSSH says of such ones.
const STAND_IN: &str = r#"#!/bin/sh
echo "$@" >> "$FOLDER/calls"
while :; do case $1 in
  -o|-p|-i) shift 2 ;;
  *) break ;;
esac; done
host=$1; shift
case $host in
  bad-name) echo "ssh: Could not resolve hostname bad-name: Name or service not known" >&2; exit 255 ;;
  bad-key) echo "me@bad-key: Permission denied (publickey)." >&2; exit 255 ;;
  bad-path) echo "sh: 1: exec: phalanx: not found" >&2; exit 127 ;;
  late) sleep 1 ;;
  full*|bad-full)
    echo once >> "$FOLDER/$host.tries"
    [ $host = bad-full ] || [ $(wc -l < "$FOLDER/$host.tries") -le 2 ] && {
      echo "kex_exchange_identification: Connection closed by remote host" >&2; exit 255; } ;;
  bad-silence) exec sleep 60 ;;
  bad-version) printf '\nphalanx node 1\n\010\000\000\000\000\0050.0.9\000'; exec cat > /dev/null ;;
  bad-folder) mv "$FOLDER/work" "$FOLDER/elsewhere" ;;
esac
echo $$ > "$FOLDER/$host.pid"
cd /
echo "Welcome to $host"
exec env -i PATH=/usr/bin:/bin HOST_OF_TEST=$host setsid -w sh -c "$*"
"#;

/// The stand-in, and what it leaves behind.
pub struct Hosts(TempDir);

impl Hosts {
    pub fn new() -> Self {
        let hosts = Self(tempfile::tempdir().unwrap());
        let script = hosts.path().join("rsh");
        write_program(&script, STAND_IN.replace("$FOLDER", hosts.path().to_str().unwrap()), 0o755);
        hosts
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// `phalanx run` on these hosts, which meet on the loopback.
    pub fn run(&self, hosts: &str, options: &[&str]) -> Command {
        let mut command = bare();
        command.env("PHALANX_RSH", self.path().join("rsh")).args(["-H", hosts, "--master-addr", "127.0.0.1"]);
        command.args(options).current_dir(self.path());
        command
    }

    /// `phalanx launch` on these hosts, of a shell script, which gets its path and the arguments.
    pub fn launch(&self, hosts: &str, options: &[&str], script: &str, arguments: &[&str]) -> Command {
        let program = self.path().join("program");
        write_program(&program, format!("#!/bin/sh\n{script}\n"), 0o755);
        let mut command = command("launch");
        command.env("PHALANX_RSH", self.path().join("rsh")).args(["-H", hosts, "--master-addr", "127.0.0.1"]);
        command.args(options).arg("--").arg(program).args(arguments).current_dir(self.path());
        command
    }

    /// `phalanx run` on the hosts that a script says there are, which meet on the loopback.
    pub fn discovered(&self, options: &[&str]) -> Command {
        let script = self.path().join("discovery");
        write_program(&script, format!("#!/bin/sh\ncat {}/hosts\n", self.path().display()), 0o755);
        let mut command = bare();
        command.env("PHALANX_RSH", self.path().join("rsh")).arg("--host-discovery-script").arg(script);
        command.args(["--master-addr", "127.0.0.1"]).args(options).current_dir(self.path());
        command
    }

    /// From now on the script says that there are these.
    pub fn name(&self, hosts: &str) {
        let (new, path) = (self.path().join("hosts.new"), self.path().join("hosts"));
        std::fs::write(&new, hosts).unwrap();
        std::fs::rename(&new, &path).unwrap();
    }

    pub fn script(&self, hosts: &str, options: &[&str], script: &str) -> Command {
        let mut command = self.run(hosts, options);
        command.args(["--", "sh", "-c", script]);
        command
    }
}
