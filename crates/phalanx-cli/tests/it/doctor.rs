//! `phalanx doctor`, alone and under the launcher.

#[path = "../../../phalanx-nccl/tests/jobs/stand_in.rs"]
mod stand_in;

use std::net::IpAddr;
use std::process::{Command, Output, Stdio};

use phalanx::interfaces::{InterfaceAddress, addresses};
use phalanx::store::host_port;

use crate::support::{bare, output, text};

const PHALANX: &str = env!("CARGO_BIN_EXE_phalanx");

/// Runs it in an environment of no launcher.
fn doctor(options: &[&str], variables: &[(&str, &str)]) -> Output {
    let mut command = Command::new(PHALANX);
    command.env_clear().envs(std::env::var_os("PATH").map(|path| ("PATH", path)));
    command.arg("doctor").args(options).envs(variables.iter().copied());
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    output(command)
}

fn finding<'a>(report: &'a serde_json::Value, check: &str) -> &'a serde_json::Value {
    let findings = report["findings"].as_array().unwrap();
    findings
        .iter()
        .find(|finding| finding["check"] == check)
        .unwrap_or_else(|| panic!("no {check} in {report}"))
}

#[test]
fn a_machine_that_runs_these_tests_is_well() {
    let output = doctor(&["--json"], &[]);
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(0), "{report}");
    assert_eq!(report["good"], true);
    assert_eq!(finding(&report, "init")["text"], "a world of one");
    for transport in ["shared memory", "tcp"] {
        let said = finding(&report, transport)["text"].as_str().unwrap();
        assert!(said.contains("4 B in ") && said.contains("1 MiB at "), "{said}");
    }
}

#[test]
fn a_name_without_an_address_is_said_to_have_none() {
    // No such name can exist: RFC 6761.
    let output = doctor(&["--json", "--store", "nowhere.invalid:29500"], &[]);
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let interface = finding(&report, "interface");
    let said = interface["text"].as_str().unwrap();
    assert!(said.starts_with("no address of nowhere.invalid:29500 is known: "), "{said}");
    assert_eq!(interface["verdict"], "bad", "{report}");
    assert_eq!(output.status.code(), Some(1), "{report}");
}

#[test]
fn the_interface_that_the_user_names_is_the_one_that_is_told() {
    let told = |named: &str| {
        let output = doctor(&["--json"], &[("GLOO_SOCKET_IFNAME", named)]);
        let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let interface = finding(&report, "interface");
        (output.status.code(), interface["verdict"].clone(), interface["text"].as_str().unwrap().to_owned())
    };
    let (code, verdict, said) = told("nosuch0");
    assert_eq!((code, verdict), (Some(1), "bad".into()), "{said}");
    assert!(said.starts_with("GLOO_SOCKET_IFNAME=\"nosuch0\": this host has no such interface"), "{said}");
    // The loopback has no effect.
    let (code, _, said) = told("lo");
    assert!(code == Some(0) && !said.contains("GLOO_SOCKET_IFNAME"), "{said}");
    if let Some(own) = outward() {
        let (_, _, said) = told(&own.interface);
        assert_eq!(said, format!("{own}: GLOO_SOCKET_IFNAME names it"));
    }
}

/// The first address of this machine at which others may reach it. A machine without a network has none.
fn outward() -> Option<InterfaceAddress> {
    let is_outward = |address: IpAddr| match address {
        IpAddr::V4(address) => !address.is_loopback() && !address.is_link_local(),
        IpAddr::V6(address) => !address.is_loopback() && !address.is_unicast_link_local(),
    };
    let own = addresses().unwrap().into_iter();
    own.filter(|own| is_outward(own.address)).min_by_key(|own| own.address)
}

#[test]
fn the_interface_is_the_one_that_leads_to_where_rank_0_serves_the_store() {
    let own = outward();
    let address = own.as_ref().map_or("127.0.0.1".to_owned(), |own| own.address.to_string());
    // Port 1 is nobody's.
    let variables =
        [("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", address.as_str()), ("MASTER_PORT", "1")];
    let output = doctor(&["--json", "--timeout", "1"], &variables);
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let said = finding(&report, "interface")["text"].as_str().unwrap();
    let expected = match own {
        Some(_) => format!("it leads to the store at {}", host_port(&address, 1)),
        None => "none leads to other machines".to_owned(),
    };
    assert!(said.ends_with(&expected), "{report}");
}

/// On the stand-ins for libcuda and libnccl, which are no GPU.
#[test]
fn libraries_and_devices_are_found_where_the_variables_say() {
    let folder = tempfile::tempdir().unwrap();
    let libraries = stand_in::build(folder.path());
    let libraries = libraries.each_ref().map(|(name, path)| (*name, path.to_str().unwrap()));
    let output = doctor(&["--json"], &libraries);
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let cuda = finding(&report, "cuda")["text"].as_str().unwrap();
    assert!(cuda.contains("a driver for CUDA 12.4; 8 devices: Stand-in, no GPU (0) with 1.0 GiB"), "{cuda}");
    let nccl = finding(&report, "nccl")["text"].as_str().unwrap();
    assert!(nccl.ends_with("libnccl.so.2, NCCL 2.27.3"), "{nccl}");
    // Nothing fails because they are not there.
    let output = doctor(&["--json"], &[("PHALANX_CUDA_LIBRARY", "/nowhere/libcuda.so.1")]);
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(finding(&report, "cuda")["verdict"], "note");
}

#[test]
fn what_is_bad_is_said_with_a_remedy_and_in_the_exit_code() {
    // Port 1 is nobody's; a rank without a world is malformed.
    let output = doctor(&["--store", "127.0.0.1:1"], &[("RANK", "0")]);
    let said = text(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{said}{}", text(&output.stderr));
    assert!(!said.contains('\x1b'), "{said}");
    let bad: Vec<&str> = said.lines().filter(|line| line.starts_with("bad ")).collect();
    assert!(bad.len() == 2 && bad[0].contains("init") && bad[0].contains("WORLD_SIZE"), "{said}");
    assert!(bad[1].contains("store") && bad[1].contains("127.0.0.1:1"), "{said}");
    assert!(said.matches("-> ").count() >= 2, "{said}");
}

#[test]
fn variables_that_no_group_takes_or_nothing_reads_are_named() {
    let variables =
        [("PHALANX_TRANSPORT", "foo"), ("PHALANX_TRANCE", "x"), ("PHALANX_JOB_KEY_FILE", "/no/key")];
    let output = doctor(&["--json"], &variables);
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(1), "{report}");
    let unknown = finding(&report, "unknown");
    assert_eq!((&unknown["text"], &unknown["verdict"]), (&"PHALANX_TRANCE".into(), &"note".into()));
    let settings = report["findings"].as_array().unwrap().iter();
    let settings: Vec<_> = settings.filter(|finding| finding["check"] == "settings").collect();
    assert!(settings.len() == 2 && settings.iter().all(|finding| finding["verdict"] == "bad"), "{report}");
    assert!(settings[0]["text"].as_str().unwrap().contains("PHALANX_TRANSPORT=foo"), "{report}");
    assert!(settings[1]["text"].as_str().unwrap().contains("/no/key"), "{report}");
}

#[test]
fn ranks_that_do_not_meet_tell_of_themselves() {
    // Rank 1 of 2, whose rank 0 never comes to a store that is nobody's.
    let variables = [
        ("RANK", "1"),
        ("WORLD_SIZE", "2"),
        ("MASTER_ADDR", "no.such.host.invalid"),
        ("MASTER_PORT", "29500"),
    ];
    let output = doctor(&["--timeout", "1"], &variables);
    let said = text(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{said}{}", text(&output.stderr));
    assert!(said.lines().any(|line| line.starts_with("bad ") && line.contains("group")), "{said}");
    // A bad setting is told once: the others have nothing to do with it.
    let output = doctor(&["--json"], &[&variables[..], &[("PHALANX_TRANSPORT", "foo")]].concat());
    let said = text(&output.stdout);
    assert_eq!((output.status.code(), said.matches("names no transport").count()), (Some(1), 1), "{said}");
}

#[test]
fn under_the_launcher_rank_0_tells_of_all() {
    let mut command = bare();
    command.args(["--nproc-per-node", "2", "--", PHALANX, "doctor", "--json"]);
    let output = output(command);
    let said = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{said}{}", text(&output.stderr));
    let reports: Vec<&str> = said.lines().collect();
    assert_eq!(reports.len(), 1, "{said}");
    let report: serde_json::Value = serde_json::from_str(reports[0].strip_prefix("[0] ").unwrap()).unwrap();
    assert!(finding(&report, "init")["text"].as_str().unwrap().starts_with("rank 0 of 2"));
    assert_eq!(finding(&report, "store")["verdict"], "good");
    assert!(finding(&report, "clocks")["text"].as_str().unwrap().contains("ms apart"));
}

#[test]
fn what_looks_like_the_rank_of_an_unknown_launcher_is_told() {
    let output = doctor(&["--json"], &[("SOME_LAUNCHERS_RANK", "3")]);
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let said = finding(&report, "launcher")["text"].as_str().unwrap();
    assert!(said.contains("SOME_LAUNCHERS_RANK=3 looks like a rank"), "{said}");
    // A rank without a number of ranks is no world of one.
    let output = doctor(&["--json"], &[("PMIX_RANK", "0")]);
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(1), "{report}");
    assert!(finding(&report, "init")["text"].as_str().unwrap().contains("PMIX_RANK=0"), "{report}");
    assert_eq!(finding(&report, "variables")["text"], "1 of PMIx");
}
