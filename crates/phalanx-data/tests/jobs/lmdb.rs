//! LMDB in several processes.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use phalanx_data::lmdb::{LmdbDataset, LmdbWriter};
use phalanx_data::{DataLoader, Dataset};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::harness::ROLE;

pub const TESTS: &[(&str, fn())] = &[
    ("lmdb_opened_in_the_constructor_and_pickled", lmdb_opened_in_the_constructor_and_pickled),
    ("a_killed_reader_leaves_no_stale_slot", a_killed_reader_leaves_no_stale_slot),
    ("a_killed_packing_leaves_no_data_set", a_killed_packing_leaves_no_data_set),
    (
        "a_limit_of_the_size_of_files_is_an_error_of_the_packing",
        a_limit_of_the_size_of_files_is_an_error_of_the_packing,
    ),
];

const ITEMS: u64 = 500;

fn packed(folder: &Path) -> PathBuf {
    let path = folder.join("packed");
    let mut writer = LmdbWriter::create(&path).unwrap();
    for n in 0..ITEMS {
        writer.push(&n.to_le_bytes()).unwrap();
    }
    writer.finish().unwrap();
    path
}

/// This program in a role, with something on its standard input.
fn start(role: &str, input: &[u8]) -> Child {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .env(ROLE, role)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(input).unwrap();
    child
}

/// What it says when it is ready.
fn line(child: &mut Child) -> String {
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    line.trim().to_owned()
}

pub fn play(role: &str) {
    let mut input = Vec::new();
    std::io::stdin().read_to_end(&mut input).unwrap();
    match role {
        "limited" => {
            let path = PathBuf::from(String::from_utf8(input).unwrap());
            let most = Rlimit { current: Some(8 << 20), ..getrlimit(Resource::Fsize) };
            setrlimit(Resource::Fsize, most).unwrap();
            let mut writer = LmdbWriter::create(path).unwrap();
            // A program may make room, and push again.
            for _ in 0..2 {
                let error = (0..40).find_map(|_| writer.push(&[0; 1 << 20]).err()).unwrap();
                println!("{error}");
            }
        }
        "pack" => {
            let path = PathBuf::from(String::from_utf8(input).unwrap());
            let mut writer = LmdbWriter::create(path).unwrap();
            for n in 0.. {
                writer.push(&[0; 1 << 20]).unwrap();
                if n == 40 {
                    println!("packing");
                } else if n > 40 {
                    // It packs until it is killed, however late that is: the disk is not to be full by then.
                    std::thread::sleep(std::time::Duration::from_millis(5));
                }
            }
        }
        _ => {
            let dataset: LmdbDataset = postcard::from_bytes(&input).unwrap();
            if role == "sum" {
                let loader = DataLoader::builder(dataset).batch_size(9).num_workers(3).build().unwrap();
                let items = loader.iter().flat_map(Result::unwrap);
                println!("{}", items.map(|item| u64::from_le_bytes(item.try_into().unwrap())).sum::<u64>());
            } else {
                // In the middle of a read.
                let _ = dataset.read(0, |_| {
                    println!("reading");
                    loop {
                        std::thread::park();
                    }
                });
            }
        }
    }
}

/// A data set that has been read from here goes to another process and to other threads.
fn lmdb_opened_in_the_constructor_and_pickled() {
    let folder = tempfile::tempdir().unwrap();
    let dataset = LmdbDataset::open(packed(folder.path())).unwrap();
    assert_eq!(dataset.get(7).unwrap(), 7_u64.to_le_bytes());
    let written = postcard::to_stdvec(&dataset).unwrap();
    let mut workers: Vec<Child> = (0..3).map(|_| start("sum", &written)).collect();
    for worker in &mut workers {
        assert_eq!(line(worker), (ITEMS * (ITEMS - 1) / 2).to_string());
        assert!(worker.wait().unwrap().success());
    }
    let moved = std::thread::spawn(move || (dataset.get(9).unwrap(), dataset));
    let (item, dataset) = moved.join().unwrap();
    assert_eq!((item, dataset.get(8).unwrap()), (9_u64.to_le_bytes().to_vec(), 8_u64.to_le_bytes().to_vec()));
}

fn killed_while_it_reads(dataset: &LmdbDataset) {
    let mut reader = start("stay", &postcard::to_stdvec(dataset).unwrap());
    assert_eq!(line(&mut reader), "reading");
    reader.kill().unwrap();
    reader.wait().unwrap();
}

fn a_killed_reader_leaves_no_stale_slot() {
    let folder = tempfile::tempdir().unwrap();
    let dataset = LmdbDataset::open(packed(folder.path())).unwrap();
    // Somebody else reads all the time, or the table of readers would begin anew with the next.
    dataset.get(0).unwrap();
    killed_while_it_reads(&dataset);
    assert_eq!(dataset.clear_stale_readers().unwrap(), 1, "it had a place, which it has left behind");
    killed_while_it_reads(&dataset);
    // The next process that opens it clears it.
    let mut other = start("sum", &postcard::to_stdvec(&dataset).unwrap());
    assert!(other.wait().unwrap().success());
    assert_eq!(dataset.clear_stale_readers().unwrap(), 0);
    assert_eq!(dataset.get(1).unwrap(), 1_u64.to_le_bytes());
}

fn a_limit_of_the_size_of_files_is_an_error_of_the_packing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("packed");
    let packing = start("limited", path.to_str().unwrap().as_bytes());
    let output = packing.wait_with_output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success() && said.matches("ulimit -f").count() == 2, "{said}");
    // Its writer was dropped.
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

fn a_killed_packing_leaves_no_data_set() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("packed");
    let mut packing = start("pack", path.to_str().unwrap().as_bytes());
    assert_eq!(line(&mut packing), "packing");
    packing.kill().unwrap();
    packing.wait().unwrap();
    assert!(LmdbDataset::open(&path).is_err());
    // Packing again needs no hand.
    packed(folder.path());
    assert_eq!(LmdbDataset::open(&path).unwrap().len() as u64, ITEMS);
}
