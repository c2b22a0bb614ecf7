//! One rank prepares, the others wait and read.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::time::Duration;

use phalanx::testing::{Fabric, run};
use phalanx::{Error, ProcessGroup, Rank};

/// The ranks in the order in which they have prepared.
fn order(world: u32, fabric: Fabric, local: bool) -> Vec<u32> {
    let order = Mutex::new(Vec::new());
    run(world, fabric, |group| {
        let rank = group.rank().get();
        let prepare = || {
            // The others would overtake a rank 0 that does not hold them up.
            std::thread::sleep(Duration::from_millis(if rank == 0 { 30 } else { 0 }));
            order.lock().unwrap().push(rank);
            Ok(10 * rank)
        };
        let value = match local {
            true => group.local_main_process_first(prepare),
            false => group.main_process_first(prepare),
        };
        assert_eq!(value.unwrap(), 10 * rank);
        group.barrier().unwrap();
    });
    order.into_inner().unwrap()
}

#[test]
fn a_data_set_prepared_by_all_ranks_at_once() {
    for fabric in Fabric::ALL {
        for world in [1, 2, 4] {
            let order = order(world, fabric, false);
            assert_eq!((order[0], order.len()), (0, world as usize), "{fabric:?}");
        }
    }
}

#[test]
fn on_each_host_its_lowest_rank_prepares_before_its_others() {
    let order = |fabric| order(4, fabric, true);
    // Ranks 0 and 1 are on one host, 2 and 3 on the other.
    let two_hosts = order(Fabric::TwoHosts);
    let mut first = two_hosts[..2].to_vec();
    first.sort_unstable();
    assert_eq!((first, two_hosts.len()), (vec![0, 2], 4));
    for one_host in [Fabric::InProcess, Fabric::Tcp, Fabric::SharedMemory] {
        assert_eq!(order(one_host)[0], 0, "{one_host:?}");
    }
}

/// What each rank gets if `culprit` fails: its error, or its panic's message.
fn failures(
    fabric: Fabric,
    culprit: u32,
    local: bool,
    fail: impl Fn() -> phalanx::Result<()> + Sync,
) -> Vec<String> {
    run(4, fabric, |group: ProcessGroup| {
        let rank = group.rank();
        let prepare = || if rank == Rank::new(culprit) { fail() } else { Ok(()) };
        let outcome = catch_unwind(AssertUnwindSafe(|| match local {
            true => group.local_main_process_first(prepare),
            false => group.main_process_first(prepare),
        }));
        // Nobody has run into a broken group.
        group.barrier().unwrap();
        match outcome {
            Ok(outcome) => {
                let error = outcome.unwrap_err();
                assert!(rank.get() == culprit || error.peer() == Some(Rank::new(culprit)), "{error}");
                error.to_string()
            }
            Err(panic) => format!("panic: {}", panic.downcast_ref::<&str>().unwrap()),
        }
    })
}

#[test]
fn a_failure_of_who_prepares_is_everybody_s_with_its_cause() {
    let full = || Err(Error::other("the disk is full").with_remedy("make room"));
    for fabric in Fabric::ALL {
        for text in failures(fabric, 0, false, full) {
            assert!(text.contains("the disk is full (make room)"), "{text}");
        }
        let texts = failures(fabric, 0, false, || panic!("torn archive"));
        assert_eq!(texts[0], "panic: torn archive");
        for text in &texts[1..] {
            let words = ["rank 0", "main_process_first", "panicked: torn archive"];
            assert!(words.iter().all(|word| text.contains(word)), "{text}");
        }
    }
    // On one host, and everybody's on the other too.
    for text in failures(Fabric::TwoHosts, 2, true, full) {
        assert!(text.contains("the disk is full (make room)"), "{text}");
    }
}

#[test]
fn a_rank_that_only_reads_fails_alone() {
    run(3, Fabric::Tcp, |group| {
        let outcome = group.main_process_first(|| match group.rank().get() {
            2 => Err(Error::other("no such file here")),
            _ => Ok(()),
        });
        assert_eq!(outcome.is_err(), group.rank().get() == 2);
        group.barrier().unwrap();
    });
}
