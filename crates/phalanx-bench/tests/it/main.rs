//! The benchmarks with real ranks, and plots.
#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

#[path = "../../../phalanx-core/tests/support/environment.rs"]
mod environment;
#[path = "../../../phalanx-nccl/tests/jobs/stand_in.rs"]
mod stand_in;

use std::collections::HashSet;
use std::path::Path;
use std::process::Output;

use serde_json::Value;

use crate::environment::command;

const COLLECTIVES: [&str; 13] = [
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "all_to_all",
    "all_gather_v",
    "all_to_all_v",
    "all_reduce_coalesced",
    "barrier",
    "send_recv",
];
const PROGRAM: &str = env!("CARGO_BIN_EXE_phalanx-bench");
/// Few calls, of few sizes.
const QUICK: [&str; 10] = ["-b", "4", "-e", "256K", "-f", "256", "-n", "4", "-w", "2"];

#[test]
fn every_collective_computes_what_it_should_on_every_transport() {
    for transport in ["tcp", "shm"] {
        for ranks in ["2", "3"] {
            for collective in COLLECTIVES {
                let rows = rows(&bench(&[collective, "--transport", transport, "--nproc-per-node", ranks]));
                assert_eq!(rows.len(), if collective == "barrier" { 1 } else { 3 }, "{collective}");
                for row in rows {
                    assert_eq!(row["wrong"], 0, "{row}");
                    assert_eq!(row["ranks"].to_string(), ranks);
                    assert!(row["min_us"].as_f64() <= row["time_us"].as_f64(), "{row}");
                }
            }
        }
    }
}

#[test]
fn types_operations_roots_and_memory_are_told() {
    const FLOATS: [&str; 6] = ["sum", "avg", "product", "min", "max", "premul_sum"];
    const INTEGERS: [&str; 7] = ["sum", "product", "min", "max", "band", "bor", "bxor"];
    const TRUTH: [&str; 5] = ["sum", "product", "band", "bor", "bxor"];
    let floats = ["f64", "f16", "bf16"].map(|dtype| (dtype, &FLOATS[..]));
    let integers = ["i32", "i64", "u8", "i8"].map(|dtype| (dtype, &INTEGERS[..]));
    for (dtype, ops) in floats.into_iter().chain(integers).chain([("bool", &TRUTH[..])]) {
        for op in ops.iter().copied() {
            let options =
                ["all_reduce", "--dtype", dtype, "--op", op, "--check", "2", "--memory", "registered"];
            let rows = rows(&bench(&[&options[..], &["-b", "1K", "-e", "1K"]].concat()));
            assert_eq!((&rows[0]["dtype"], &rows[0]["op"]), (&dtype.into(), &op.into()));
        }
    }
    let rows = rows(&bench(&["broadcast", "--root", "1"]));
    assert_eq!((&rows[0]["root"], rows[0].get("op")), (&1.into(), None));
}

/// On the stand-ins for libcuda and libnccl, which are no GPU: what is timed means nothing, and what is computed does.
#[test]
fn what_nccl_has_computes_what_it_should_on_devices() {
    let folder = tempfile::tempdir().unwrap();
    let libraries = stand_in::build(folder.path());
    let on_devices = |options: &[&str]| {
        let mut command = command(PROGRAM);
        command.args(options).args(["--device", "cuda", "--json=-"]).args(QUICK);
        command.envs(libraries.iter().map(|(name, path)| (name, path))).output().unwrap()
    };
    for collective in [
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "broadcast",
        "reduce",
        "all_to_all",
        "barrier",
        "send_recv",
    ] {
        let output = on_devices(&[collective, "--nproc-per-node", "3", "--dtype", "bf16"]);
        assert!(output.status.success(), "{collective}: {}", String::from_utf8_lossy(&output.stderr));
        let rows = rows(&output);
        assert!(!rows.is_empty(), "{collective}");
        // A barrier has no elements and so no type.
        let name = if collective == "barrier" { "Phalanx, cuda" } else { "Phalanx, cuda, bf16" };
        for row in rows {
            assert_eq!((&row["wrong"], &row["name"]), (&0.into(), &name.into()), "{row}");
        }
    }
    for (options, remedy) in [
        (&["gather"][..], "NCCL has no gather"),
        (&["all_reduce", "--dtype", "bool"], "time u8"),
        (&["all_reduce", "--dtype", "f32", "--op", "premul_sum"], "--op may be sum, avg, product"),
        (&["all_reduce", "--transport", "tcp"], "--transport"),
    ] {
        let output = on_devices(options);
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && text.contains(remedy), "{options:?}: {text}");
    }
    // Without the libraries it is said which one is missing, and what to do.
    let missing = command(PROGRAM)
        .args(["all_reduce", "--device", "cuda", "--nproc-per-node", "1"])
        .env("PHALANX_CUDA_LIBRARY", "/nowhere/libcuda.so.1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&missing.stderr);
    assert!(!missing.status.success() && text.contains("libcuda.so.1 cannot be opened"), "{text}");
}

#[test]
fn bandwidths_are_those_of_nccl_tests() {
    for (collective, factor) in [("all_reduce", 4.0 / 3.0), ("all_gather", 2.0 / 3.0), ("broadcast", 1.0)] {
        let row = &rows(&bench(&[collective, "--nproc-per-node", "3", "-b", "300", "-e", "300"]))[0];
        let number = |name: &str| row[name].as_f64().unwrap();
        let algbw = number("bytes") / number("time_us") / 1e3;
        assert!((number("algbw_gbs") / algbw - 1.0).abs() < 1e-6, "{row}");
        assert!((number("busbw_gbs") / algbw / factor - 1.0).abs() < 1e-6, "{row}");
    }
}

#[test]
fn the_table_is_for_people() {
    let output = run(&[&["all_gather", "--transport", "tcp"][..], &QUICK].concat());
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.starts_with("# Phalanx, tcp: all_gather, f32, 2 ranks\n"), "{text}");
    for word in ["algbw", "busbw", "GB/s", "µs", "\n       8 B ", "\n     1 KiB ", "\n   256 KiB "] {
        assert!(text.contains(word), "{word:?} is not in {text}");
    }
}

#[test]
fn what_makes_no_sense_is_answered_with_the_flag_that_mends_it() {
    for (options, remedy) in [
        (&["broadcast", "--op", "sum"][..], "leave --op away"),
        (&["all_reduce", "--root", "0"], "leave --root away"),
        (&["barrier", "--plot", "x.png"], "leave --plot away"),
        (&["all_to_all", "--tune", "x.json"], "leave --tune away"),
        (&["reduce_scatter", "--tune", "x.json"], "give --tune with `all_reduce`"),
        (&["all_reduce", "-b", "8", "-e", "4"], "--min-bytes"),
        (&["all_reduce", "--dtype", "float"], "f32, f64"),
        (&["all_reduce", "--op", "bxor"], "--op may be sum, avg"),
        (&["broadcast", "--root", "2"], "--nproc-per-node"),
        (&["all_reduce", "--plot", "/nowhere/x.png"], "/nowhere/x.png"),
        (&["all_reduce", "--json", "/nowhere/x.json"], "--json /nowhere/x.json"),
        (&["all_reduce", "--json", "x", "--plot", "x"], "a file of its own"),
        (&["all_reduce", "--json", "x", "--plot", "./x"], "a file of its own"),
        (&["all_reduce", "--plot", "x.png", "--peers", "x.json", "--json", "x.json"], "--json another name"),
        (&["send_recv", "--nproc-per-node", "1"], "--nproc-per-node"),
        (&["all_to_all", "-b", "1024G", "-e", "1024G"], "--max-bytes"),
        (&["all_reduce", "-e", "1025G"], "1024G"),
        (&["all_reduce", "-n", "4000000000"], "10000000"),
        (&["rpc", "-n", "4000000000"], "10000000"),
        (&["faults", "--kills", "0", "--freezes", "0"], "--kills"),
    ] {
        let output = run(options);
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && text.contains(remedy), "{options:?}: {text}");
    }
}

#[test]
fn ranks_that_are_to_fail_take_the_variables_of_this_command() {
    let folder = tempfile::tempdir().unwrap();
    let key = folder.path().join("key");
    phalanx::JobKey::generate().unwrap().write_new(&key).unwrap();
    let mut command = command(PROGRAM);
    command.args(["faults", "--worlds", "2", "--kills", "1", "--freezes", "0", "--json"]);
    command.env("PHALANX_TRANSPORT", "tcp").env("PHALANX_JOB_KEY_FILE", &key);
    let rows = rows(&command.output().unwrap());
    assert_eq!((rows.len(), &rows[0]["transport"]), (1, &Value::from("tcp")));
}

#[test]
fn what_was_not_checked_is_not_said_to_be_right() {
    let row = &rows(&bench(&["all_reduce", "--check", "0"]))[0];
    assert_eq!(row["wrong"], Value::Null, "{row}");
    let output = run(&[&["all_reduce", "--check", "0"][..], &QUICK].concat());
    let text = String::from_utf8(output.stdout).unwrap();
    let last = text.lines().last().unwrap();
    assert!(output.status.success() && last.ends_with(" -"), "{text}");
}

#[test]
fn nothing_takes_the_place_of_the_times() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("times.json");
    let times = r#"{"name": "x", "collective": "all_reduce", "ranks": 2, "bytes": 4, "time_us": 2.0}"#;
    std::fs::write(&file, times).unwrap();
    let link = folder.path().join("link.json");
    std::os::unix::fs::symlink(&file, &link).unwrap();
    let (file, link, plot) = (file.to_str().unwrap(), link.to_str().unwrap(), folder.path().join("x.png"));
    let plot = plot.to_str().unwrap();
    for options in [
        &["plot", file, "-o", file][..],
        &["plot", file, "-o", link],
        &["all_reduce", "--plot", file, "--peers", file],
        &["all_reduce", "--plot", link, "--peers", file],
        &["all_reduce", "--plot", plot, "--peers", file, "--json", link],
        &["all_reduce", "--plot", plot, "--peers", link, "--json", file],
    ] {
        let output = run(options);
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && text.contains("another name"), "{options:?}: {text}");
        assert_eq!(std::fs::read_to_string(file).unwrap(), times);
    }
}

#[test]
fn a_plot_shows_what_was_measured_now_and_before() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (json, now, again) = (file("tcp.json"), file("now.png"), file("again.png"));
    let time = |options: &[&str]| {
        let output = run(&[&["all_reduce"], options, &QUICK].concat());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    };
    time(&["--transport", "tcp", "--json", &json]);
    time(&["--transport", "shm", "--plot", &now, "--peers", &json]);
    assert!(run(&["plot", &json, "-o", &again]).status.success());

    // Two curves have more colours than one.
    assert!(colours(now.as_ref()) > colours(again.as_ref()));
    let output = run(&["plot", &json, "-o", &again, "--ranks", "4"]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("all_reduce with 2 ranks"));
}

#[test]
fn algorithms_are_timed_apart_and_the_table_is_one_that_groups_take() {
    let folder = tempfile::tempdir().unwrap();
    let table = folder.path().join("tuning.json");
    for (collective, algorithms) in
        [("all_reduce", 3), ("broadcast", 2), ("reduce", 2), ("gather", 2), ("scatter", 2), ("all_gather", 2)]
    {
        let options = ["--nproc-per-node", "3", "--transport", "tcp", "--tune", table.to_str().unwrap()];
        let rows = rows(&bench(&[&[collective], &options[..]].concat()));
        assert_eq!(rows.len(), 3 * algorithms, "{collective}");
        for sizes in rows.chunks(algorithms) {
            let names: HashSet<_> = sizes.iter().map(|row| row["algorithm"].as_str().unwrap()).collect();
            assert_eq!(names.len(), algorithms, "{collective}: {sizes:?}");
        }
        assert!(rows.iter().all(|row| row["wrong"] == 0), "{rows:?}");
        assert!(
            rows.iter().all(|row| row["name"].as_str().unwrap().starts_with("Phalanx, tcp,")),
            "{rows:?}"
        );
    }
    let mut command = command(PROGRAM);
    command.args(["all_reduce", "--nproc-per-node", "3"]).args(QUICK).env("PHALANX_TUNING", &table);
    assert!(command.output().unwrap().status.success());
}

#[test]
fn where_no_table_is_used_there_is_nothing_to_tune() {
    let folder = tempfile::tempdir().unwrap();
    let table = folder.path().join("tuning.json");
    let table = table.to_str().unwrap();
    for (options, remedy) in [
        (&["--nproc-per-node", "2"][..], "--transport tcp"),
        (&["--nproc-per-node", "3", "--transport", "shm"], "--transport tcp"),
        (&["--nproc-per-node", "1"], "--nproc-per-node"),
    ] {
        let output = run(&[&["all_reduce", "--tune", table], options, &QUICK].concat());
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && text.contains(remedy), "{options:?}: {text}");
    }
    assert!(!Path::new(table).exists());
}

#[test]
fn a_table_that_cannot_be_kept_is_refused_before_anything_is_timed() {
    let folder = tempfile::tempdir().unwrap();
    let broken = folder.path().join("broken.json");
    std::fs::write(&broken, "{").unwrap();
    for table in [broken.to_str().unwrap(), "/nowhere/tuning.json", folder.path().to_str().unwrap()] {
        let options = ["all_reduce", "--nproc-per-node", "3", "--transport", "tcp", "--tune", table];
        let output = run(&[&options[..], &QUICK].concat());
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && text.contains(&format!("--tune {table}")), "{text}");
        assert!(output.stdout.is_empty(), "{}", String::from_utf8_lossy(&output.stdout));
    }
}

#[test]
fn remote_calls_are_timed_on_every_transport() {
    for transport in ["tcp", "shm"] {
        let options = ["rpc", "--json=-", "--transport", transport, "-b", "4", "-e", "64K", "-f", "128"];
        let rows = rows(&run(&[&options[..], &["-n", "20", "--in-flight", "4"]].concat()));
        let sizes: Vec<_> = rows.iter().map(|row| row["bytes"].as_u64().unwrap()).collect();
        assert_eq!(sizes, [4, 512, 65536]);
        for row in rows {
            let number = |name: &str| row[name].as_f64().unwrap();
            assert_eq!(row["transport"], transport, "{row}");
            assert!(0.0 < number("time_us") && number("time_us") <= number("p99_us"), "{row}");
            let moved = number("calls_per_s") * 2.0 * number("bytes") / 1e6;
            assert!((number("mb_per_s") / moved - 1.0).abs() < 1e-6, "{row}");
        }
    }
    let table = run(&["rpc", "-e", "4", "-n", "5"]);
    let text = String::from_utf8_lossy(&table.stdout);
    assert!(table.status.success() && text.contains("calls/s") && text.contains("\n       4 B "), "{text}");
    assert_eq!(text.lines().nth(1).unwrap().split_whitespace().collect::<Vec<_>>(), ["µs", "µs"], "{text}");
    for (options, remedy) in [
        (&["rpc", "-b", "8", "-e", "4"][..], "--min-bytes"),
        (&["rpc", "-e", "1G"], "--max-bytes"),
        (&["rpc", "--in-flight", "65"], "--in-flight"),
    ] {
        let output = run(options);
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && text.contains(remedy), "{options:?}: {text}");
    }
}

#[test]
fn a_start_is_timed() {
    let output = phalanx(&["bench", "startup", "-n", "2", "--nproc-per-node", "3"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8_lossy(&output.stdout);
    let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!((&lines[0][..], &lines[1][..]), (&["p50", "p99"][..], &["ms", "ms"][..]), "{text}");
    let names: Vec<&str> = lines.iter().skip(2).map(|line| line[0]).collect();
    assert_eq!(names, ["program", "job", "beyond"], "{text}");
    let times: Vec<f64> = lines.iter().skip(2).map(|line| line[1].parse().unwrap()).collect();
    assert!(times[0] > 0.0 && times[1] > 0.0 && (times[1] - times[0] - times[2]).abs() < 0.2, "{text}");
}

#[test]
fn help_shows_the_command_that_the_user_has_typed() {
    for (output, usage) in [
        (phalanx(&["bench", "--help"]), "Usage: phalanx bench "),
        (phalanx(&["bench", "faults", "--help"]), "Usage: phalanx bench faults "),
        (phalanx(&["bench", "rpc", "--help"]), "Usage: phalanx bench rpc "),
        (phalanx(&["plot", "--help"]), "Usage: phalanx plot "),
        (run(&["--help"]), "Usage: phalanx-bench "),
    ] {
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains(usage), "{usage}: {text}");
    }
}

fn bench(options: &[&str]) -> Output {
    // What is given twice is refused.
    let quick = if options.contains(&"-b") { &QUICK[6..] } else { &QUICK[..] };
    run(&[&["--json=-"], options, quick].concat())
}

fn run(arguments: &[&str]) -> Output {
    start(Path::new(PROGRAM), arguments)
}

/// The command `phalanx`, which this package does not build.
fn phalanx(arguments: &[&str]) -> Output {
    let program = Path::new(PROGRAM).with_file_name("phalanx");
    assert!(program.exists(), "this test needs the command: cargo build --workspace --bins");
    start(&program, arguments)
}

fn start(program: &Path, arguments: &[&str]) -> Output {
    command(program).args(arguments).output().unwrap()
}

fn rows(output: &Output) -> Vec<Value> {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8_lossy(&output.stdout);
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// How many colours a picture has.
fn colours(file: &Path) -> usize {
    let decoder = png::Decoder::new(std::io::BufReader::new(std::fs::File::open(file).unwrap()));
    let mut reader = decoder.read_info().unwrap();
    let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
    reader.next_frame(&mut pixels).unwrap();
    pixels.chunks(3).collect::<HashSet<_>>().len()
}
