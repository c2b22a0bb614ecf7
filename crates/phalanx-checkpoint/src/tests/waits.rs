//! What ranks wait for.

use std::panic::{AssertUnwindSafe, catch_unwind};

use phalanx_proto::world_size::WorldSize;

use super::*;

#[test]
fn another_rank_s_error_is_the_cause_until_something_else_is_called() {
    let group = ProcessGroup::alone().unwrap();
    let cause = group.note_remote_error(Error::aborted("its disk is full").with_peer(Rank::new(1)));
    assert_eq!(group.remote_error().map(|told| told.to_string()), Some(cause.to_string()));
    group.barrier().unwrap();
    assert!(group.remote_error().is_none());
}

#[test]
fn the_others_wait_until_rank_0_has_opened_the_folder_whatever_the_group_s_time_out() {
    let root = tempfile::tempdir().unwrap();
    // Another job's: rank 0 waits whether it gives the folder back.
    let other = Claimant { job: Some("other".to_owned()), round: 1 };
    let _owner = Owner::claim(root.path(), &other, None).unwrap();
    run(2, Fabric::InProcess, |group| {
        let impatient = group.with_timeout(Duration::from_millis(100));
        let error = Checkpoints::open(root.path(), &impatient).unwrap_err();
        assert!(error.to_string().contains("another process writes checkpoints"), "{error}");
        assert!(group.failure().is_none());
    });
}

#[test]
fn the_others_wait_for_the_reading_anew_once_the_write_in_flight_has_ended() {
    let root = before();
    let (send, receive) = std::sync::mpsc::channel::<(ProcessGroup, u64)>();
    let (send, receive) = (Mutex::new(Some(send)), Mutex::new(receive));
    run(2, Fabric::InProcess, |group| {
        let checkpoints = Checkpoints::open(root.path(), &group).unwrap();
        let saved = if group.rank().is_main() {
            checkpoints.newest_by(|path| {
                let (other, calls) = receive.lock().recv().unwrap();
                // The other rank has heard of the end of the write, said what is in its folder, and called something else.
                let deadline = Deadline::after(Duration::from_secs(60));
                while other.calls() < calls + 3 {
                    assert!(!deadline.has_passed(), "rank 1 waits for the first call still");
                    std::thread::sleep(Duration::from_millis(1));
                }
                Search::new(path)
            })
        } else {
            send.lock().take().unwrap().send((group.clone(), group.calls())).unwrap();
            checkpoints.newest()
        };
        assert_eq!(saved.unwrap().unwrap().step(), 2);
    });
}

/// Memory that the thread that writes reads when it may.
struct Held(std::thread::ThreadId, Mutex<std::sync::mpsc::Receiver<()>>);

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        if std::thread::current().id() != self.0 {
            // An error says the same: nobody holds it any more.
            let _ = self.1.lock().recv();
        }
        &[0; 4]
    }
}

#[test]
fn a_state_is_not_copied_while_the_copy_of_the_one_before_is_written() {
    let (root, group) = (tempfile::tempdir().unwrap(), ProcessGroup::alone().unwrap());
    let checkpoints = Checkpoints::open(root.path(), &group).unwrap();
    let (release, held) = std::sync::mpsc::channel();
    let lent = Held(std::thread::current().id(), Mutex::new(held));
    checkpoints.save(1, |snapshot| snapshot.tensor_bytes("lent", DType::F32, &[1], lent)).unwrap();
    let checkpoints = checkpoints.with_timeout(Duration::from_millis(20));
    let error = checkpoints.save(2, |_| panic!("it was copied")).unwrap_err();
    assert!(error.is_timeout() && error.to_string().contains("step 1 is still being written"), "{error}");
    drop(release);
    let checkpoints = checkpoints.with_timeout(Duration::from_secs(60));
    checkpoints.save(3, |snapshot| snapshot.value("step", &3)).unwrap();
    checkpoints.finish().unwrap();
    assert_eq!(folder::list(root.path()).unwrap().len(), 2);
}

#[test]
fn a_slow_disk_of_rank_0_is_a_time_out_on_every_rank() {
    let root = tempfile::tempdir().unwrap();
    let (release, held) = std::sync::mpsc::channel::<()>();
    let (release, held) = (Mutex::new(Some(release)), Mutex::new(Some(held)));
    run(2, Fabric::InProcess, |group| {
        let checkpoints = Checkpoints::open(root.path(), &group).unwrap();
        // On rank 0 alone.
        let fill = |snapshot: &mut Snapshot| {
            let lent = Held(std::thread::current().id(), Mutex::new(held.lock().take().unwrap()));
            snapshot.tensor_bytes("lent", DType::F32, &[1], lent)
        };
        checkpoints.save(1, fill).unwrap();
        let checkpoints = checkpoints.with_timeout(Duration::from_millis(20));
        let errors = [
            checkpoints.save_sharded(2, |_| Ok(())).unwrap_err(),
            checkpoints.newest().map(drop).unwrap_err(),
        ];
        for error in errors {
            assert!(
                error.is_timeout() && error.to_string().contains("step 1 is still being written"),
                "{error}"
            );
        }
        assert!(group.failure().is_none());
        drop(release.lock().take());
        checkpoints.with_timeout(Duration::from_secs(60)).finish().unwrap();
    });
}

#[test]
fn a_rank_that_panics_while_it_collects_its_part_is_an_error_on_the_others() {
    let root = tempfile::tempdir().unwrap();
    run(2, Fabric::InProcess, |group| {
        let checkpoints = Checkpoints::open(root.path(), &group).unwrap();
        let fill =
            |_: &mut Snapshot| if group.rank().is_main() { Ok(()) } else { panic!("there is no such layer") };
        match catch_unwind(AssertUnwindSafe(|| checkpoints.save_sharded(1, fill))) {
            Ok(saved) => {
                let error = saved.unwrap_err().to_string();
                assert!(error.contains("rank 1 panicked: there is no such layer"), "{error}");
            }
            Err(_) => assert!(!group.rank().is_main()),
        }
        assert!(group.failure().is_none() && checkpoints.newest().unwrap().is_none());
    });
}

#[test]
fn a_rank_that_panics_tells_the_others_before_it_waits_for_its_disk() {
    let root = tempfile::tempdir().unwrap();
    let (release, held) = std::sync::mpsc::channel::<()>();
    let (release, held) = (Mutex::new(Some(release)), Mutex::new(Some(held)));
    run(2, Fabric::InProcess, |group| {
        let checkpoints = Checkpoints::open(root.path(), &group).unwrap();
        if group.rank().is_main() {
            let lent = Held(std::thread::current().id(), Mutex::new(held.lock().take().unwrap()));
            checkpoints.save(1, |snapshot| snapshot.tensor_bytes("lent", DType::F32, &[1], lent)).unwrap();
            let outcome: std::thread::Result<()> = catch_unwind(AssertUnwindSafe(move || {
                let _checkpoints = checkpoints;
                panic!("an index is out of range");
            }));
            assert!(outcome.is_err());
            return;
        }
        let error = group.barrier().unwrap_err().to_string();
        assert!(error.contains("rank 0 panicked"), "{error}");
        // Only now the write can end.
        drop(release.lock().take());
    });
}

#[test]
fn saves_that_are_left_to_a_rank_0_that_was_lost_are_errors_but_for_the_first() {
    let (root, world) = (tempfile::tempdir().unwrap(), WorldSize::new(2).unwrap());
    let open = |group: &ProcessGroup| Checkpoints::open(root.path(), group).unwrap();
    for (lost, is_refused) in [(Rank::MAIN, true), (Rank::new(1), false)] {
        let mut groups = ProcessGroup::in_process(world).unwrap().into_iter();
        let (first, second) = (groups.next().unwrap(), groups.next().unwrap());
        let (main, other) = std::thread::scope(|scope| {
            let main = scope.spawn(move || open(&first));
            let other = open(&second);
            (main.join().unwrap(), other)
        });
        other.save(1, |_| panic!("rank 0 saves")).unwrap();
        second.abort(Error::aborted("its host is gone").with_peer(lost));
        // The loop may be about to open them anew: it hears of that in its next step.
        other.save(2, |_| panic!("rank 0 saves")).unwrap();
        for step in [3, 4] {
            let saved = other.save(step, |_| panic!("rank 0 saves"));
            assert_eq!(saved.is_err(), is_refused, "{saved:?}");
            if let Err(error) = saved {
                let is_told = error.to_string().contains("its host is gone");
                assert!(is_told && error.is_aborted() && error.remedy().is_some(), "{error}");
            }
        }
        drop((main, other));
    }
}
