use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;
use crate::caller::Caller;
use crate::dtype::DType;
use crate::rank::Generation;
use crate::wire::frame::{History, Operation};

fn barrier(caller: Option<Caller>) -> Call {
    Call {
        operation: Operation::Barrier,
        dtype: DType::U8,
        elements: 0,
        reduce: None,
        root: None,
        parts: 0,
        tuning: 0,
        caller,
    }
}

fn health() -> Arc<Health> {
    Health::new(Rank::MAIN, vec!["a".into(), "b".into(), "c".into()])
}

#[test]
fn the_first_cause_stays_and_the_alarm_rings_once() {
    let (health, rings) = (health(), Arc::new(AtomicUsize::new(0)));
    let counter = rings.clone();
    health.on_failure(Box::new(move |_| {
        counter.fetch_add(1, Ordering::Relaxed);
    }));
    health.lost(Rank::new(2), "its connection closed", ProcessState::Unknown);
    let second = health.fail(Error::timeout("late"));
    assert_eq!(second.peer(), Some(Rank::new(2)));
    assert_eq!(rings.load(Ordering::Relaxed), 1);
    let counter = rings.clone();
    health.on_failure(Box::new(move |_| {
        counter.fetch_add(1, Ordering::Relaxed);
    }));
    assert_eq!(rings.load(Ordering::Relaxed), 2, "an alarm that comes late rings at once");
}

#[test]
fn a_rank_that_lacks_memory_itself_blames_no_peer() {
    use rustix::io::Errno;
    let error =
        |errno: Errno| health().broken(Rank::new(2), io::Error::from_raw_os_error(errno.raw_os_error()));
    for own in [Errno::NOBUFS, Errno::NOMEM, Errno::MFILE] {
        let error = error(own);
        assert!(error.peer().is_none() && !error.is_peer_failure() && error.remedy().is_some(), "{error}");
    }
    assert_eq!(error(Errno::CONNRESET).peer(), Some(Rank::new(2)));
}

#[test]
fn nobody_sees_a_failure_before_the_peers_have_been_told() {
    let (health, told) = (health(), Arc::new(AtomicUsize::new(0)));
    let counter = told.clone();
    let (start, started) = std::sync::mpsc::channel();
    health.on_failure(Box::new(move |_| {
        start.send(()).unwrap();
        std::thread::sleep(Duration::from_millis(50));
        counter.fetch_add(1, Ordering::SeqCst);
    }));
    let failing = health.clone();
    let alarm = std::thread::spawn(move || {
        failing.lost(Rank::new(2), "its connection closed", ProcessState::Unknown)
    });
    started.recv().unwrap();
    assert_eq!(health.cause().unwrap().peer(), Some(Rank::new(2)));
    assert_eq!(told.load(Ordering::SeqCst), 1);
    alarm.join().unwrap();
}

#[test]
fn a_broken_connection_is_explained_by_whoever_knows_more() {
    let health = health();
    let waiting = health.clone();
    let operation = std::thread::spawn(move || {
        let echo = waiting.peer_failed(Rank::new(1), "its connection closed");
        waiting.fail_operation(echo, barrier(None), Sequence(4))
    });
    health.lost(Rank::new(2), "its connection closed", ProcessState::Unknown);
    let error = operation.join().unwrap();
    assert_eq!(error.peer(), Some(Rank::new(2)));
    assert_eq!((error.operation(), error.sequence()), (Some("barrier"), Some(Sequence(4))));
}

#[test]
fn a_store_that_is_gone_may_be_a_rank_that_died() {
    let health = health();
    let waiting = health.clone();
    let store = std::thread::spawn(move || waiting.explain(Error::protocol("the store is gone")));
    health.lost(Rank::MAIN, "its connection closed", ProcessState::Unknown);
    assert_eq!(store.join().unwrap().peer(), Some(Rank::MAIN));
}

#[test]
fn a_cause_that_comes_from_another_host_may_come_later() {
    let health = health();
    let broken = health.peer_failed(Rank::new(1), "its connection closed");
    assert_eq!(health.explanation_timeout(&broken), EXPLANATION_TIMEOUT);
    health.set_far(vec![false, true, false]);
    assert_eq!(health.explanation_timeout(&broken), FAR_EXPLANATION_TIMEOUT);
    let near = health.peer_failed(Rank::new(2), "its connection closed");
    assert_eq!(health.explanation_timeout(&near), EXPLANATION_TIMEOUT);
    // Any rank may know more of what has happened to a store.
    assert_eq!(health.explanation_timeout(&Error::protocol("the store is gone")), FAR_EXPLANATION_TIMEOUT);
}

#[test]
fn only_one_whose_process_has_ended_is_called_dead() {
    let lost = |state| health().lost(Rank::new(1), "connection reset by peer", state).to_string();
    assert!(
        lost(ProcessState::Gone).contains("rank 1 (b) died: its process has ended, connection reset by peer")
    );
    let alive = lost(ProcessState::Alive);
    assert!(
        alive.contains("rank 1 (b) was lost: connection reset by peer, while its process is alive"),
        "{alive}"
    );
    assert!(!alive.contains("died") && !lost(ProcessState::Unknown).contains("died"));
}

#[test]
fn a_peer_that_said_goodbye_did_not_die() {
    let health = health();
    health.left(Rank::new(1));
    let echo = health.peer_failed(Rank::new(1), "its connection closed");
    let error = health.fail_operation(echo, barrier(None), Sequence(4));
    assert!(error.is_peer_left(), "{error}");
    let remedy =
        "give every rank the same number of steps; if rank 1 had an error before, its own output says so";
    assert!(error.to_string().contains(remedy), "{error}");
}

#[test]
fn a_peer_that_has_told_its_last_call_has_left_also_before_its_goodbye_comes() {
    let (health, peer) = (health(), Rank::new(1));
    let last = Header {
        call: barrier(None),
        sequence: Sequence(3),
        generation: Generation(0),
        history: History::default(),
        payload: 0,
    };
    health.calls(|calls| calls.hear(peer, last, calls::Told::Last));
    assert_eq!(health.calls(|calls| calls.absent(Sequence(4))), Some(peer));
    let error = health.fail_without(peer, barrier(None), Sequence(4));
    assert!(error.is_peer_left() && error.peer() == Some(peer), "{error}");
    // No call has returned it: it is the error of leaving.
    health.note_failed_call(&error);
    health.part(drop);
    assert!(health.parting().is_some_and(|error| error.is_peer_left()));
}

#[test]
fn who_has_left_in_the_middle_of_an_epoch_is_shown_the_way() {
    let health = health();
    health.left(Rank::new(1));
    let echo = health.peer_failed(Rank::new(1), "its connection closed");
    let error = health.fail_operation(echo, barrier(Some(Caller::DdpBackward)), Sequence(4));
    assert!(error.is_peer_left(), "{error}");
    let text = error.to_string();
    assert!(text.contains("Ddp::backward [barrier] #4: rank 1 (b) has left the group"), "{text}");
    assert!(text.contains("has rank 1 fewer batches? Run the epoch inside Ddp::join"), "{text}");
}
