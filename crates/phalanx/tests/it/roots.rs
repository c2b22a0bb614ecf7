//! Ranks that give different roots. In such calls some ranks only send, so their own calls can return before they hear of
//! anything.

use std::sync::Barrier;
use std::time::Duration;

use phalanx::testing::{Fabric, run};
use phalanx::{ProcessGroup, Rank, ReduceOp, Result};

/// An operation with a root.
type Rooted = fn(&ProcessGroup, Rank) -> Result<()>;

const OPERATIONS: [(&str, Rooted); 6] = [
    ("broadcast", |group, root| group.broadcast(&mut [group.rank().get() as f32; 4], root)),
    ("reduce", |group, root| group.reduce(&mut [1.0f32; 4], root, ReduceOp::Sum)),
    ("gather", gather),
    ("scatter", scatter),
    ("scatter or reduce", |group, root| match root == Rank::MAIN {
        true => scatter(group, root),
        false => group.reduce(&mut [1.0f32; 4], root, ReduceOp::Sum),
    }),
    ("broadcast_object", |group, root| {
        let own = (group.rank() == root).then_some(7u8);
        group.broadcast_object(own.as_ref(), root).map(drop)
    }),
];

fn gather(group: &ProcessGroup, root: Rank) -> Result<()> {
    let mut all = vec![0.0; if group.rank() == root { group.world_size().count() } else { 0 }];
    group.gather(&[1.0f32], &mut all, root)
}

fn scatter(group: &ProcessGroup, root: Rank) -> Result<()> {
    let all = vec![1.0f32; if group.rank() == root { group.world_size().count() } else { 0 }];
    group.scatter(&all, &mut [0.0], root)
}

/// What each rank gives as the root.
const WORLDS: &[&[u32]] = &[
    &[0, 1],
    &[1, 0],
    &[1, 1],
    &[0, 1, 2],
    &[1, 2, 0],
    &[0, 0, 2],
    &[0, 2, 2],
    &[2, 2, 2],
    &[0, 0, 3, 3],
    &[0, 1, 2, 3],
    &[2, 2, 0, 0],
    &[3, 3, 3, 3],
];

/// In the first call of a group ranks that share memory wait for each other. After it some only send.
fn first_call(group: &ProcessGroup, fabric: Fabric) -> Result<()> {
    if fabric == Fabric::SharedMemory { group.barrier() } else { Ok(()) }
}

/// Each rank makes one call, with its root, and closes the group.
fn check(name: &str, operation: Rooted, roots: &[u32], fabric: Fabric, is_first: bool) {
    let outcomes = run(roots.len() as u32, fabric, |group| {
        let group = group.with_timeout(Duration::from_secs(60));
        if !is_first {
            group.barrier()?;
        }
        let root = group.world_size().rank(roots[group.rank().index()])?;
        operation(&group, root)?;
        group.close()
    });
    let what = format!("{name} with the roots {roots:?} over {fabric:?}: {outcomes:?}");
    if roots.iter().all(|root| *root == roots[0]) {
        assert!(outcomes.iter().all(Result::is_ok), "{what}");
    } else {
        let is_mismatch = |outcome: &Result<()>| outcome.as_ref().is_err_and(phalanx::Error::is_mismatch);
        assert!(outcomes.iter().all(is_mismatch), "{what}");
        // Threads of one process have no connections to say which call it was. On a slow machine that may take longer than ranks wait for
        // it: then they say that there was one.
        let shows_both = |outcome: &Result<()>| {
            let text = outcome.as_ref().err().map(ToString::to_string).unwrap_or_default();
            text.matches("root ").count() >= 2 || text.contains("have made different calls on this group")
        };
        assert!(fabric == Fabric::InProcess || outcomes.iter().all(shows_both), "{what}");
    }
}

fn check_all(fabric: Fabric, is_first: bool) {
    for (name, operation) in OPERATIONS {
        WORLDS.iter().for_each(|roots| check(name, operation, roots, fabric, is_first));
    }
}

#[test]
fn every_rank_hears_of_different_roots_over_tcp() {
    check_all(Fabric::Tcp, true);
}

#[test]
fn every_rank_hears_of_different_roots_in_shared_memory() {
    [true, false].into_iter().for_each(|is_first| check_all(Fabric::SharedMemory, is_first));
}

#[test]
fn every_rank_hears_of_different_roots_between_hosts() {
    check_all(Fabric::TwoHosts, true);
}

/// Between threads nobody compares the calls of ranks that wait for each other: here all only send.
#[test]
fn every_rank_hears_of_different_roots_between_threads() {
    for (name, operation) in &OPERATIONS[..4] {
        let is_sent_by_the_root = ["broadcast", "scatter"].contains(name);
        let all_send: &[&[u32]] =
            if is_sent_by_the_root { &[&[0, 1], &[0, 1, 2]] } else { &[&[1, 0], &[1, 2, 0]] };
        for roots in all_send.iter().chain(&[&[1, 1][..]]) {
            check(name, *operation, roots, Fabric::InProcess, true);
        }
    }
}

/// The call is the last one, and the ranks leave without waiting for each other.
#[test]
fn who_leaves_after_another_root_hears_of_it() {
    for (name, operation) in OPERATIONS {
        for (roots, fabric) in [Fabric::Tcp, Fabric::TwoHosts, Fabric::SharedMemory]
            .into_iter()
            .flat_map(|fabric| WORLDS.iter().map(move |roots| (roots, fabric)))
        {
            // Who leaves waits two seconds for the ranks of its host: none may begin later than that.
            let all_are_here = Barrier::new(roots.len());
            let outcomes = run(roots.len() as u32, fabric, |group| {
                first_call(&group, fabric)?;
                all_are_here.wait();
                let root = group.world_size().rank(roots[group.rank().index()])?;
                operation(&group.with_timeout(Duration::from_secs(60)), root)?;
                group.leave()
            });
            let what = format!("{name} with the roots {roots:?} over {fabric:?}: {outcomes:?}");
            let is_mismatch = |outcome: &Result<()>| outcome.as_ref().is_err_and(phalanx::Error::is_mismatch);
            // One that still waits for a rank may learn first that it has left.
            let has_left = |outcome: &Result<()>| outcome.as_ref().is_err_and(phalanx::Error::is_peer_left);
            match roots.iter().all(|root| *root == roots[0]) {
                true => assert!(outcomes.iter().all(Result::is_ok), "{what}"),
                false => {
                    assert!(outcomes.iter().any(is_mismatch), "{what}");
                    assert!(
                        outcomes.iter().all(|outcome| is_mismatch(outcome) || has_left(outcome)),
                        "{what}"
                    );
                }
            }
        }
    }
}

/// It comes to its call when a rank that has made another one has left.
#[test]
fn a_late_rank_compares_calls_before_it_says_that_another_has_left() {
    for fabric in [Fabric::Tcp, Fabric::TwoHosts, Fabric::SharedMemory] {
        let all_are_here = Barrier::new(3);
        let outcomes = run(3, fabric, |group| {
            first_call(&group, fabric)?;
            all_are_here.wait();
            let root = Rank::new(u32::from(group.rank().get() == 2));
            if root == Rank::new(1) {
                std::thread::sleep(Duration::from_millis(100));
            }
            group.with_timeout(Duration::from_secs(60)).broadcast(&mut [1.0f32; 4], root)?;
            group.leave()
        });
        for rank in [1, 2] {
            let is_mismatch = outcomes[rank].as_ref().is_err_and(phalanx::Error::is_mismatch);
            assert!(is_mismatch, "rank {rank} over {fabric:?}: {outcomes:?}");
        }
    }
}

/// After the call that differs, a rank hears nothing from the one whose frame it has not read.
#[test]
fn a_call_in_which_ranks_differed_is_found_in_any_later_one() {
    for fabric in [Fabric::Tcp, Fabric::TwoHosts, Fabric::InProcess, Fabric::SharedMemory] {
        let outcomes = run(4, fabric, |group| {
            let group = group.with_timeout(Duration::from_secs(60));
            first_call(&group, fabric)?;
            let own = group.rank();
            // Host 0 and host 1 have a root each.
            let root = Rank::new(if own.get() < 2 { 0 } else { 2 });
            let first = group.broadcast(&mut [own.get() as f32], root);
            // All send to rank 1 alone.
            let second = first.and_then(|()| gather(&group, Rank::new(1)));
            second.and_then(|()| group.close())
        });
        let is_mismatch = |outcome: &Result<()>| outcome.as_ref().is_err_and(phalanx::Error::is_mismatch);
        assert!(outcomes.iter().all(is_mismatch), "{fabric:?}: {outcomes:?}");
    }
}
