use super::*;
use crate::optimizer::{Adam, Sgd};

fn shard(
    consistency: Consistency,
    compensation: Compensation,
    rule: impl UpdateRule + 'static,
    workers: u32,
) -> Shard {
    let layout = Layout::new(&[1, 2]).unwrap();
    let clocks = Clocks::new(consistency, (0..workers).map(Rank::new));
    Shard::new(layout, vec![1.0, 2.0, 3.0], Arc::new(rule), compensation, clocks).unwrap()
}

fn received(numbers: &[f32]) -> Floats<'static> {
    Floats::Received(bytemuck::cast_slice::<f32, u8>(numbers).to_vec().into())
}

fn step(worker: u32, number: u64, push: &[f32], advance: bool, pull: bool) -> Op<'static> {
    Op::Step {
        worker: Rank::new(worker),
        number,
        push: (!push.is_empty()).then(|| (0..2, received(push))),
        advance,
        pull: pull.then_some(0..2),
    }
}

#[test]
fn gradients_of_a_step_are_averaged_when_all_have_ended_it() {
    let mut shard = shard(Consistency::Bsp, Compensation::default(), Sgd::new(1.0), 2);
    shard.apply(&step(0, 1, &[1.0, 0.0, 0.0], false, false)).unwrap();
    shard.apply(&step(0, 2, &[1.0, 0.0, 2.0], true, false)).unwrap();
    assert_eq!(shard.parameters(&(0..2)).unwrap(), [1.0, 2.0, 3.0]);
    assert!(!shard.clocks().may_go(Rank::MAIN));
    assert!(shard.apply(&step(0, 3, &[9.0; 3], true, false)).is_err(), "it must wait");
    shard.apply(&step(1, 1, &[0.0, 4.0, 0.0], true, false)).unwrap();
    assert_eq!(shard.parameters(&(0..2)).unwrap(), [0.0, 0.0, 2.0]);
    // Rank 1 pushes, and dies before it ends the step: it does not count.
    shard.apply(&step(1, 2, &[5.0; 3], false, false)).unwrap();
    shard.apply(&step(0, 3, &[-1.0, 0.0, 0.0], true, false)).unwrap();
    shard.apply(&Op::Leave(Rank::new(1), None)).unwrap();
    assert_eq!(shard.parameters(&(0..2)).unwrap(), [1.0, 0.0, 2.0]);
    assert_eq!((shard.updates(), shard.record().histogram[0]), (4, 5));
}

#[test]
fn a_step_that_was_ended_counts_if_its_worker_is_gone_before_the_others_have_ended_it() {
    let first = |shard: &Shard| shard.parameters(&(0..1)).unwrap()[0];
    let mut shard = shard(Consistency::Bsp, Compensation::default(), Sgd::new(1.0), 3);
    shard.apply(&step(2, 1, &[6.0; 3], true, true)).unwrap();
    shard.apply(&Op::Leave(Rank::new(2), None)).unwrap();
    shard.apply(&step(0, 1, &[3.0; 3], true, true)).unwrap();
    assert_eq!(first(&shard), 1.0, "rank 1 has not ended it");
    shard.apply(&step(1, 1, &[0.0; 3], true, true)).unwrap();
    assert_eq!(first(&shard), -2.0, "the mean of three");
    // The next step is of two. Rank 1 is frozen in it; the time-out of rank 0 passes, and it leaves and joins again.
    shard.apply(&step(0, 2, &[2.0; 3], true, true)).unwrap();
    shard.apply(&Op::Leave(Rank::MAIN, Some(3))).unwrap();
    shard.apply(&Op::Join(Rank::MAIN, 4)).unwrap();
    shard.apply(&Op::Enter { worker: Rank::MAIN, number: 5, clock: 1, keys: 0..2 }).unwrap();
    shard.apply(&step(0, 6, &[4.0; 3], true, true)).unwrap();
    assert_eq!(first(&shard), -2.0);
    shard.apply(&Op::Leave(Rank::new(1), None)).unwrap();
    assert_eq!(first(&shard), -5.0, "the mean of both steps of rank 0");
    // The last worker's step counts, too, if it leaves before one that is frozen.
    shard.apply(&Op::Join(Rank::new(1), 2)).unwrap();
    shard.apply(&step(0, 7, &[1.0; 3], true, true)).unwrap();
    shard.apply(&Op::Leave(Rank::MAIN, Some(8))).unwrap();
    assert_eq!(first(&shard), -5.0);
    shard.apply(&Op::Leave(Rank::new(1), None)).unwrap();
    assert_eq!(first(&shard), -6.0);
    // Nothing counts twice.
    shard.apply(&Op::Join(Rank::MAIN, 9)).unwrap();
    shard.apply(&step(0, 10, &[1.0; 3], true, true)).unwrap();
    assert_eq!(first(&shard), -7.0);
}

#[test]
fn an_operation_that_comes_after_a_later_one_of_its_rank_is_refused_also_after_it_has_left() {
    let mut shard = shard(Consistency::Asp, Compensation::default(), Sgd::new(1.0), 1);
    let joiner = Rank::new(1);
    // It has given up, and left. Its question to join comes now.
    shard.apply(&Op::Leave(joiner, Some(2))).unwrap();
    let error = shard.apply(&Op::Join(joiner, 1)).unwrap_err();
    assert!(error.to_string().contains("operation 1 of rank 1 comes after 2"), "{error}");
    assert!(!shard.clocks().workers().contains_key(&joiner));
    shard.apply(&Op::Join(joiner, 3)).unwrap();
    shard.apply(&Op::Join(joiner, 3)).unwrap();
    // A step of its earlier life.
    assert!(shard.apply(&step(1, 1, &[1.0; 3], true, true)).is_err());
    assert!(shard.apply(&Op::Leave(joiner, Some(2))).is_err());
    assert!(shard.apply(&Op::Enter { worker: joiner, number: 2, clock: 0, keys: 0..2 }).is_err());
    assert_eq!(shard.parameters(&(0..2)).unwrap(), [1.0, 2.0, 3.0]);
    assert_eq!(shard.clocks().workers()[&joiner], 0);
    shard.apply(&step(1, 4, &[1.0; 3], true, true)).unwrap();
    assert_eq!(shard.parameters(&(0..2)).unwrap(), [0.0, 1.0, 2.0]);
}

#[test]
fn an_operation_that_comes_again_is_not_applied_again() {
    let mut shard = shard(Consistency::Asp, Compensation::default(), Sgd::new(1.0), 2);
    shard.apply(&step(1, 1, &[1.0; 3], true, false)).unwrap();
    let op = step(0, 7, &[1.0; 3], true, true);
    assert_eq!(shard.apply(&op).unwrap(), 1);
    let after = shard.parameters(&(0..2)).unwrap().to_vec();
    assert_eq!(shard.apply(&op).unwrap(), 1, "the same answer");
    assert_eq!(shard.parameters(&(0..2)).unwrap(), after);
    assert!(shard.apply(&step(0, 6, &[], false, true)).is_err());
}

#[test]
fn what_is_not_allowed_changes_nothing() {
    let mut shard = shard(Consistency::Asp, Compensation::default(), Sgd::new(1.0), 1);
    let bad = |push: Option<(Range<usize>, usize)>, pull: Option<Range<usize>>| Op::Step {
        worker: Rank::MAIN,
        number: 1,
        push: push.map(|(keys, count)| (keys, received(&vec![1.0; count]))),
        advance: true,
        pull,
    };
    for op in [
        bad(Some((0..2, 2)), None),
        bad(Some((0..3, 3)), None),
        bad(Some((0..2, 3)), Some(1..3)),
        step(4, 1, &[], true, false),
    ] {
        assert!(shard.apply(&op).is_err(), "{op:?}");
    }
    assert_eq!(shard.parameters(&(0..2)).unwrap(), [1.0, 2.0, 3.0]);
    assert_eq!(shard.clocks().slowest(), 0);
    shard.apply(&bad(Some((0..2, 3)), None)).unwrap();
}

#[test]
fn staleness_is_the_updates_since_the_pull_and_divides_the_learning_rate_if_asked() {
    let compensation = Compensation { staleness_aware: true, delay: None };
    let mut shard = shard(Consistency::Ssp(9), compensation, Sgd::new(1.0), 2);
    for number in 1..=4 {
        assert_eq!(shard.apply(&step(0, number, &[0.0; 3], true, true)).unwrap(), 0);
    }
    assert_eq!(shard.apply(&step(1, 1, &[4.0, 0.0, 0.0], false, false)).unwrap(), 4);
    assert_eq!(shard.parameters(&(0..1)).unwrap(), [0.0], "4.0 / 4");
    assert_eq!(shard.apply(&step(1, 2, &[], false, true)).unwrap(), 0);
    assert_eq!(shard.apply(&step(1, 3, &[4.0, 0.0, 0.0], false, false)).unwrap(), 0, "it has pulled");
    assert_eq!(shard.parameters(&(0..1)).unwrap(), [-4.0]);
    assert_eq!(shard.record().histogram[4], 1);
    assert_eq!(shard.record().lead, 3);
}

#[test]
fn delay_compensation_follows_the_paper() {
    let delayed = |delay, rate| {
        let compensation = Compensation { staleness_aware: false, delay: Some(delay) };
        let mut shard = shard(Consistency::Asp, compensation, Sgd::new(rate), 2);
        shard.apply(&step(0, 1, &[2.0, 0.0, 0.0], true, true)).unwrap();
        let moved = shard.parameters(&(0..1)).unwrap()[0] - 1.0;
        shard.apply(&step(1, 1, &[3.0, 0.0, 0.0], true, true)).unwrap();
        (moved, shard.parameters(&(0..1)).unwrap()[0])
    };
    let (moved, after) = delayed(DelayCompensation::Constant(0.5), 0.1);
    let expected = 1.0 + moved - 0.1 * (3.0 + 0.5 * 9.0 * moved);
    assert!((after - expected).abs() < 1e-6, "{after}, {expected}");
    let (moved, after) = delayed(DelayCompensation::Adaptive { lambda: 2.0, mean: 0.95 }, 0.1);
    let square: f32 = 0.95 * (0.05 * 4.0) + 0.05 * 9.0;
    let expected = 1.0 + moved - 0.1 * (3.0 + 2.0 / (square + 1e-7).sqrt() * 9.0 * moved);
    assert!((after - expected).abs() < 1e-6, "{after}, {expected}");
    // Without drift the gradient is what it was.
    assert!((moved + 0.2).abs() < 1e-6);
}

#[test]
fn a_replica_that_takes_the_same_operations_has_the_same_bits() {
    let make = || {
        let delay = Some(DelayCompensation::Adaptive { lambda: 0.1, mean: 0.9 });
        shard(Consistency::Ssp(2), Compensation { staleness_aware: true, delay }, Adam::w(0.01, 0.1), 3)
    };
    let (mut primary, mut replica) = (make(), make());
    for number in 1..200u64 {
        let worker = (number * 7 % 5 % 3) as u32;
        let op = match number % 50 {
            20 => Op::Leave(Rank::new(2), Some(number)),
            30 => Op::Join(Rank::new(2), number),
            _ => step(worker, number, &[number as f32 * 0.1, -0.3, 1.0], number % 3 != 0, number % 2 == 0),
        };
        let bytes = postcard::to_stdvec(&op).unwrap();
        let outcome = primary.apply(&op).map_err(|error| error.to_string());
        assert_eq!(
            replica.apply(&postcard::from_bytes(&bytes).unwrap()).map_err(|error| error.to_string()),
            outcome
        );
    }
    let bits =
        |shard: &Shard| shard.parameters(&(0..2)).unwrap().iter().map(|p| p.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&primary), bits(&replica));
    assert!(primary.updates() > 50);
}

#[test]
fn who_joins_begins_with_one_step_on_all_servers() {
    let make = || shard(Consistency::Bsp, Compensation::default(), Sgd::new(1.0), 1);
    // Step 1 has come to the first server, and is still on its way to the second.
    let (mut first, mut second) = (make(), make());
    let joiner = Rank::new(1);
    let enter = |number, clock| Op::Enter { worker: joiner, number, clock, keys: 0..2 };
    first.apply(&step(0, 1, &[1.0; 3], true, true)).unwrap();
    let clock = |shard: &Shard| shard.clocks().workers()[&joiner];
    for shard in [&mut first, &mut second] {
        shard.apply(&Op::Join(joiner, 1)).unwrap();
    }
    let latest = clock(&first).max(clock(&second));
    assert_eq!((clock(&first), clock(&second), latest), (1, 0, 1));
    for shard in [&mut first, &mut second] {
        shard.apply(&enter(2, latest)).unwrap();
    }
    assert!(first.clocks().may_go(joiner) && !second.clocks().may_go(joiner));
    second.apply(&step(0, 1, &[1.0; 3], true, true)).unwrap();
    // The step before it was not its: the mean is of one.
    assert_eq!(second.parameters(&(0..2)).unwrap(), [0.0, 1.0, 2.0]);
    for shard in [&mut first, &mut second] {
        assert_eq!((clock(shard), shard.clocks().may_go(joiner)), (1, true));
        shard.apply(&step(1, 3, &[4.0; 3], true, true)).unwrap();
        shard.apply(&step(0, 2, &[0.0; 3], true, true)).unwrap();
        assert_eq!(shard.parameters(&(0..2)).unwrap(), [-2.0, -1.0, 0.0]);
    }
    let error = first.apply(&enter(4, 1)).unwrap_err().to_string();
    assert!(error.contains("has ended 2 steps"), "{error}");
    let stranger = Op::Enter { worker: Rank::new(5), number: 1, clock: 9, keys: 0..2 };
    assert!(first.apply(&stranger).is_err(), "no worker");
}

#[test]
fn who_joins_has_what_it_pulls() {
    let mut shard = shard(Consistency::Asp, Compensation::default(), Sgd::new(1.0), 1);
    let joiner = Rank::new(1);
    shard.apply(&Op::Join(joiner, 1)).unwrap();
    shard.apply(&step(0, 1, &[1.0; 3], true, true)).unwrap();
    shard.apply(&Op::Enter { worker: joiner, number: 2, clock: 1, keys: 0..2 }).unwrap();
    assert_eq!(shard.apply(&step(1, 3, &[1.0; 3], true, true)).unwrap(), 0);
}
