//! Single situations of the controller.

use std::time::Duration;

use crate::dtype::DType;
use crate::wire::MAX_OBJECT_BYTES;

use super::simulation::{World, allreduce, tensor};
use super::*;
use crate::horovod::reduction::Op;
use crate::horovod::request::Part;

fn world(size: usize) -> World {
    World::new(size, 8, StallTimes { warn: Some(Duration::from_secs(60)), end: Duration::from_secs(1800) })
}

fn names(responses: &[Response]) -> Vec<&str> {
    responses.iter().map(|response| response.request.name.as_str()).collect()
}

#[test]
fn a_name_is_ready_when_the_last_rank_has_it_and_from_then_on_bits_are_enough() {
    let mut world = world(3);
    world.submit(0, allreduce("a", 4));
    world.submit(2, allreduce("a", 4));
    assert!(world.cycle().is_empty());
    assert!(world.negotiated);
    assert!(world.cycle().is_empty());
    assert!(!world.negotiated, "there is nothing new to say");
    world.submit(1, allreduce("a", 4));
    assert_eq!(names(&world.cycle()), ["a"]);
    for _ in 0..3 {
        (0..3).for_each(|rank| world.submit(rank, allreduce("a", 4)));
        assert_eq!(names(&world.cycle()), ["a"]);
        assert!(!world.negotiated, "no name is on the wire");
    }
}

#[test]
fn a_changed_shape_is_negotiated_anew_by_all() {
    let mut world = world(2);
    (0..2).for_each(|rank| world.submit(rank, allreduce("a", 4)));
    world.cycle();
    world.submit(0, allreduce("a", 4)); // as before: a bit
    assert!(world.cycle().is_empty());
    world.submit(1, allreduce("a", 5)); // not as before
    let ready = world.cycle();
    let error = ready[0].error.as_deref().unwrap();
    assert_eq!(error, r#""a": rank 0 submits allreduce(sum) of f32 [4], rank 1 allreduce(sum) of f32 [5]"#);
    assert!(world.is_done());
    (0..2).for_each(|rank| world.submit(rank, allreduce("a", 5)));
    assert!(world.cycle()[0].error.is_none());
}

#[test]
fn every_disagreement_names_both_sides() {
    let of = |kind: Kind, dtype: DType, shape: &[u64]| Request {
        name: "t".into(),
        kind,
        parts: vec![Part { dtype, stands_for: None, shape: shape.to_vec() }],
    };
    let sum = || Kind::Allreduce(Op::Sum.into());
    let first = of(sum(), DType::F32, &[2, 3]);
    let cases = [
        (of(sum(), DType::F64, &[2, 3]), "f64 [2, 3]"),
        (of(sum(), DType::F32, &[3, 2]), "f32 [3, 2]"),
        (of(Kind::Allreduce(Op::Max.into()), DType::F32, &[2, 3]), "allreduce(max)"),
        (of(Kind::Broadcast { root: 1 }, DType::F32, &[2, 3]), "broadcast(root 1)"),
        (of(Kind::Allgather, DType::F32, &[2, 3]), "allgather of"),
    ];
    for (other, expected) in cases {
        let mut world = world(3);
        world.submit(0, first.clone());
        world.submit(1, first.clone());
        world.submit(2, other);
        let ready = world.cycle();
        let error = ready[0].error.as_deref().unwrap();
        assert!(error.contains("rank 0 submits allreduce(sum) of f32 [2, 3]"), "{error}");
        assert!(error.contains("rank 2") && error.contains(expected), "{error}");
        assert!(world.is_done(), "every rank's handle gets it");
    }
}

#[test]
fn what_waits_for_too_long_is_named_with_the_ranks_that_lack_it() {
    for cached in [false, true] {
        let mut world = world(4);
        if cached {
            (0..4).for_each(|rank| world.submit(rank, allreduce("grad.w", 4)));
            world.cycle();
        }
        world.submit(0, allreduce("grad.w", 4));
        world.submit(2, allreduce("grad.w", 4));
        world.cycle();
        world.pass(Duration::from_secs(59));
        world.cycle();
        assert_eq!(world.warning(), None);
        world.pass(Duration::from_secs(2));
        world.cycle();
        let warning = world.warning().unwrap();
        assert!(warning.contains(r#""grad.w" (submitted by ranks 0, 2; missing: ranks 1, 3)"#), "{warning}");
        assert_eq!(world.warning(), None, "once a minute");
        world.pass(Duration::from_secs(61));
        assert!(world.warning().is_some());
        world.pass(Duration::from_secs(1800));
        world.cycle();
        let stalled = world.stalled.clone().unwrap();
        assert!(stalled.contains("within 1800 s") && stalled.contains("missing: ranks 1, 3"), "{stalled}");
    }
}

#[test]
fn what_a_rank_refuses_ends_the_calls_of_the_others_and_its_name_is_free_again() {
    for cached in [false, true] {
        let mut world = world(3);
        if cached {
            (0..3).for_each(|rank| world.submit(rank, allreduce("a", 4)));
            assert_eq!(world.cycle().len(), 1);
        }
        world.submit(0, allreduce("a", 4));
        assert!(world.cycle().is_empty());
        world.refuse(1, "a", "there is no such root");
        assert!(world.cycle().is_empty());
        let refusal = Refusal { name: "a".into(), cause: "there is no such root".into() };
        let told = |rank| vec![Refused { refusal: refusal.clone(), rank: 1, told: vec![rank] }];
        assert_eq!(world.refused(0), told(0), "it waits no longer");
        assert!(world.refused(1).is_empty() && world.refused(2).is_empty());
        [0, 1, 2].into_iter().for_each(|rank| world.submit(rank, allreduce("a", 4)));
        assert!(world.cycle().is_empty());
        assert_eq!(world.refused(2), told(2), "it calls later");
        world.pass(Duration::from_secs(61));
        world.submit(2, allreduce("a", 4));
        assert_eq!(names(&world.cycle()), ["a"]);
        assert!(world.is_done() && world.warning().is_none());
    }
}

#[test]
fn all_tensors_of_a_large_model_can_be_refused_at_once() {
    let mut world = world(2);
    let names = || (0..3000).map(|index| index.to_string());
    names().for_each(|name| world.refuse(0, &name, "there is no such root"));
    world.cycle();
    names().for_each(|name| world.submit(1, allreduce(&name, 4)));
    world.cycle();
    assert_eq!(world.refused(1).len(), 3000);
    assert!(world.is_done());
}

#[test]
fn a_call_that_all_ranks_refuse_ends_nothing() {
    let mut world = world(3);
    for rank in 0..3 {
        world.refuse(rank, "a", "not defined for i32");
        assert!(world.cycle().is_empty());
    }
    (0..3).for_each(|rank| world.submit(rank, allreduce("a", 4)));
    assert_eq!(names(&world.cycle()), ["a"]);
    assert!((0..3).all(|rank| world.refused(rank).is_empty()));
}

#[test]
fn a_name_in_flight_that_is_refused_again_and_again_fills_no_memory() {
    let mut controller = Controller::new(Rank::new(1), 2, 8, world(1).stall, crate::some_time());
    controller.submit(allreduce("a", 4), crate::some_time());
    for name in ["a", "b"] {
        let refusal = Refusal { name: name.into(), cause: "why".into() };
        (0..MAX_REFUSALS).for_each(|_| controller.refuse(refusal.clone()));
        assert_eq!(controller.later.len() + controller.refusals.len(), MAX_REFUSALS);
    }
}

#[test]
fn a_rank_that_joins_meets_no_refusal() {
    let mut world = world(3);
    world.refuse(1, "a", "not defined for i32");
    world.join(2);
    world.cycle();
    world.submit(0, allreduce("a", 4));
    assert!(world.cycle().is_empty());
    assert_eq!(world.refused(0).len(), 1);
    [0, 1].into_iter().for_each(|rank| world.submit(rank, allreduce("a", 4)));
    assert_eq!(world.cycle()[0].absent, [2]);
    [0, 1].into_iter().for_each(|rank| world.join(rank));
    world.cycle();
    assert!(world.all_joined.is_some());
    (0..3).for_each(|rank| world.submit(rank, allreduce("a", 4)));
    assert_eq!(names(&world.cycle()), ["a"]);
}

#[test]
fn ranks_without_data_hold_nobody_up_and_the_last_one_is_known() {
    let mut world = world(3);
    (0..3).for_each(|rank| world.submit(rank, allreduce("a", 4)));
    (0..3).for_each(|rank| world.submit(rank, tensor(Kind::Allgather, "g", 2)));
    assert_eq!(world.cycle().len(), 2);
    world.join(1);
    assert!(world.cycle().is_empty(), "it has nothing in flight, and the others neither");
    for rank in [0, 2] {
        world.submit(rank, allreduce("a", 4)); // a bit
        world.submit(rank, tensor(Kind::Allgather, "g", 2)); // a bit, but the rows are others now
        world.submit(rank, allreduce("new", 4));
    }
    let ready = world.cycle();
    assert_eq!(names(&ready), ["a", "g", "new"]);
    assert_eq!(ready[1].rows, [[2], [0], [2]]);
    assert_eq!((&ready[1].absent[..], &ready[2].absent[..]), (&[1][..], &[1][..]));
    world.submit(0, tensor(Kind::Broadcast { root: 1 }, "b", 4));
    world.submit(2, tensor(Kind::Broadcast { root: 1 }, "b", 4));
    let error = world.cycle()[0].error.clone().unwrap();
    assert!(error.contains("has joined"), "{error}");
    world.join(2);
    world.cycle();
    assert_eq!(world.all_joined, None);
    world.join(0);
    world.cycle();
    assert_eq!(world.all_joined, Some(0));
    (0..3).for_each(|rank| world.submit(rank, allreduce("a", 4)));
    (0..3).for_each(|rank| world.submit(rank, allreduce("new", 4)));
    assert_eq!(world.cycle().len(), 2, "after that all have data again");
}

#[test]
fn a_rank_may_join_before_what_it_has_submitted_is_carried_out() {
    let mut world = world(2);
    (0..2).for_each(|rank| world.submit(rank, allreduce("a", 4)));
    world.cycle();
    world.join(1);
    world.cycle();
    world.submit(0, allreduce("a", 4)); // a bit
    world.join(0);
    let ready = world.cycle();
    assert_eq!(names(&ready), ["a"]);
    assert_eq!((&ready[0].absent[..], world.all_joined), (&[1][..], Some(0)));
    assert!(world.is_done());
}

#[test]
fn ranks_that_have_joined_do_not_wait_for_ever() {
    let mut world = world(3);
    (0..3).for_each(|rank| world.submit(rank, allreduce("a", 4)));
    world.cycle();
    world.join(1);
    world.cycle();
    for _ in 0..10 {
        // The others still have data: that is no reason for a warning.
        world.pass(Duration::from_secs(50));
        [0, 2].into_iter().for_each(|rank| world.submit(rank, allreduce("a", 4)));
        assert_eq!(world.cycle().len(), 1);
        assert_eq!(world.warning(), None);
    }
    world.pass(Duration::from_secs(61));
    world.cycle();
    let warning = world.warning().unwrap();
    assert!(
        warning.contains("nothing was carried out for 60 s: rank 1 joined, and ranks 0, 2 did not"),
        "{warning}"
    );
    assert_eq!((world.warning(), world.stalled.clone()), (None, None));
    world.pass(Duration::from_secs(1800));
    world.cycle();
    let stalled = world.stalled.clone().unwrap();
    assert!(stalled.contains("within 1800 s: rank 1 joined, and ranks 0, 2 did not"), "{stalled}");
}

#[test]
fn a_rank_sends_no_more_than_its_share_in_a_cycle() {
    let size = 1 << 15; // a share of 8 KiB
    let mut controller = Controller::new(Rank::new(1), size, 8, world(1).stall, crate::some_time());
    let now = crate::some_time();
    let name = |index: usize| format!("{index} {}", "n".repeat(1000));
    (0..20).for_each(|index| {
        controller.refuse(Refusal { name: name(index), cause: "w".repeat(1000) });
    });
    (0..20).for_each(|index| controller.submit(allreduce(&name(index), 4), now));
    controller.join();
    let (mut sent, mut refused) = (Vec::new(), Vec::new());
    loop {
        let flags = controller.vector(now, false)[0];
        assert!(Flag::Negotiate.is_set(flags), "it has more to say");
        let message = controller.message(now);
        let bytes = postcard::to_stdvec(&message).unwrap().len();
        assert!(bytes <= MAX_OBJECT_BYTES / size, "{bytes}");
        assert!(!message.refusals.is_empty() || !message.requests.is_empty());
        assert!(
            message.requests.is_empty() || refused.len() + message.refusals.len() == 20,
            "refusals first"
        );
        refused.extend(message.refusals.into_iter().map(|refusal| refusal.name));
        sent.extend(message.requests.into_iter().map(|(request, _)| request.name));
        if message.joins {
            break;
        }
    }
    assert_eq!(sent, (0..20).map(name).collect::<Vec<_>>(), "it has joined with the last one");
    assert_eq!(refused, sent);
    assert!(!Flag::Negotiate.is_set(controller.vector(now, false)[0]));
}

#[test]
fn an_answer_to_something_else_is_refused() {
    let mut controller = Controller::new(Rank::new(1), 2, 8, world(1).stall, crate::some_time());
    controller.submit(allreduce("a", 4), crate::some_time());
    let response = Response { request: allreduce("a", 5), rows: Vec::new(), absent: Vec::new(), error: None };
    let round = Round { responses: vec![response], ..Round::default() };
    let error = controller.finish(round).unwrap_err();
    assert!(error.is_mismatch() && error.to_string().contains("has not asked for"), "{error}");
}

#[test]
fn bits_of_another_length_and_answers_for_unknown_names_are_refused() {
    let mut controller = Controller::new(Rank::new(1), 2, 8, world(1).stall, crate::some_time());
    assert!(controller.combined(&[]).unwrap_err().is_mismatch());
    assert!(controller.combined(&[0, 0, 0]).unwrap_err().is_mismatch());
    let response = Response { request: allreduce("a", 4), rows: Vec::new(), absent: Vec::new(), error: None };
    let round = Round { responses: vec![response], ..Round::default() };
    assert!(controller.finish(round).unwrap_err().to_string().contains("which rank 1 lacks"));
    assert!(controller.round(Vec::new(), crate::some_time()).is_err());
}
