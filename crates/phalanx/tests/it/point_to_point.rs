//! Messages between two ranks, on every transport: their order, their independence of everything else, their failures.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use phalanx::testing::{Fabric, run};
use phalanx::{Buffer, DType, Error, P2pOp, ProcessGroup, Rank, ReduceOp, Result};
use proptest::prelude::*;

/// Nothing in here may wait for this long.
const WAIT_LIMIT: Duration = Duration::from_secs(20);
/// More than rings and connections hold.
const LONG: usize = 16 << 20;

fn patient(group: &ProcessGroup) -> ProcessGroup {
    group.with_timeout(WAIT_LIMIT)
}

fn other(group: &ProcessGroup) -> Rank {
    Rank::new(1 - group.rank().get())
}

/// Bytes that tell sender, receiver and number apart.
fn message(from: Rank, to: Rank, number: usize, length: usize) -> Buffer {
    let seed = from.index() * 31 + to.index() * 7 + number * 3;
    Buffer::from_slice(&(0..length).map(|index| (seed + index) as u8).collect::<Vec<_>>())
}

fn check(received: Result<Buffer>, from: Rank, to: Rank, number: usize, length: usize) {
    let (received, expected) = (received.unwrap(), message(from, to, number, length));
    assert!(received.as_bytes() == expected.as_bytes(), "message {number} of {length} from {from} to {to}");
}

#[test]
fn long_messages_cross_each_other_in_any_mixture_of_calls() {
    type Exchange = fn(&ProcessGroup, &[u8], &mut [u8], Rank) -> Result<()>;
    let exchanges: [Exchange; 4] = [
        |group, data, into, peer| {
            let sent = group.isend(Buffer::from_slice(data), peer)?;
            group.recv(into, peer)?;
            sent.wait().map(drop)
        },
        |group, data, into, peer| {
            let received = group.irecv(Buffer::zeroed(DType::U8, into.len()), peer)?;
            group.send(data, peer)?;
            into.copy_from_slice(received.wait()?.as_slice()?);
            Ok(())
        },
        |group, data, into, peer| {
            let sent = P2pOp::send(Buffer::from_slice(data), peer);
            let received = P2pOp::recv(Buffer::zeroed(DType::U8, into.len()), peer);
            let mut works = group.batch_isend_irecv(vec![sent, received])?;
            into.copy_from_slice(works.remove(1).wait()?.as_slice()?);
            works.remove(0).wait().map(drop)
        },
        |group, data, into, peer| match group.rank().is_main() {
            true => group.send(data, peer).and_then(|()| group.recv(into, peer)),
            false => group.recv(into, peer).and_then(|()| group.send(data, peer)),
        },
    ];
    for fabric in Fabric::ALL {
        run(2, fabric, |group| {
            let (group, peer, rank) = (patient(&group), other(&group), group.rank().get() as u8);
            for exchange in exchanges {
                let mut into = vec![9; LONG];
                exchange(&group, &vec![rank; LONG], &mut into, peer).unwrap();
                assert!(into.iter().all(|byte| *byte == 1 - rank));
            }
        });
    }
}

#[test]
fn messages_of_a_pair_keep_their_order_whoever_drives_them() {
    const COUNT: usize = 400;
    let length = |number: usize| [0, 1, 63, 64, 65, 1000, 100_000][number % 7];
    for fabric in Fabric::ALL {
        run(2, fabric, |group| {
            let (group, rank, peer) = (patient(&group), group.rank(), other(&group));
            let (mut sent, mut received) = (Vec::new(), Vec::new());
            for number in 0..COUNT {
                // Blocking ones stand among asynchronous ones, on rank 0 others than on rank 1.
                let own = message(rank, peer, number, length(number));
                match number % 5 == 4 && rank.is_main() {
                    true => group.send::<u8>(own.as_slice().unwrap(), peer).unwrap(),
                    false => sent.push(group.isend(own, peer).unwrap()),
                }
                match number % 3 == 2 && !rank.is_main() {
                    true => {
                        let mut into = Buffer::zeroed(DType::U8, length(number));
                        group.recv::<u8>(into.as_mut_slice().unwrap(), peer).unwrap();
                        check(Ok(into), peer, rank, number, length(number));
                    }
                    false => {
                        let into = Buffer::zeroed(DType::U8, length(number));
                        received.push((number, group.irecv(into, peer).unwrap()));
                    }
                }
            }
            for (number, work) in received {
                check(work.wait(), peer, rank, number, length(number));
            }
            sent.into_iter().for_each(|work| drop(work.wait().unwrap()));
        });
    }
}

#[test]
fn parts_that_are_sent_together_are_one_message() {
    for fabric in Fabric::ALL {
        run(2, fabric, |group| {
            let (group, peer) = (patient(&group), other(&group));
            // In a header's place, in a ring, and longer than one; some parts are empty.
            for lengths in [&[0usize; 0][..], &[0, 3, 0, 9, 1], &[10, 300_000, 0, 77], &[1 << 20, 3, 1 << 20]]
            {
                let whole = message(Rank::MAIN, Rank::new(1), 1, lengths.iter().sum());
                if group.rank().is_main() {
                    let mut rest = whole.as_bytes();
                    let mut parts = Vec::new();
                    for length in lengths {
                        let (part, later) = rest.split_at(*length);
                        parts.push(part);
                        rest = later;
                    }
                    group.send_parts(&parts, peer).unwrap();
                } else {
                    let mut got = vec![0u8; whole.len()];
                    group.recv(&mut got, peer).unwrap();
                    assert!(got == whole.as_bytes(), "{lengths:?} over {fabric:?}");
                }
            }
        });
    }
}

#[test]
fn a_message_in_flight_stands_in_no_collectives_way() {
    for fabric in Fabric::ALL {
        for world in 2..=5 {
            run(world, fabric, |group| {
                let (group, rank) = (patient(&group), group.rank());
                let others: Vec<Rank> = group.world_size().ranks().filter(|peer| *peer != rank).collect();
                let receive = |peer: &Rank| group.irecv(Buffer::zeroed(DType::U8, 1 << 20), *peer).unwrap();
                let received: Vec<_> = others.iter().map(receive).collect();
                // Nobody has sent anything yet.
                let mut sum = [1i64];
                group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
                assert_eq!(sum, [i64::from(world)]);
                let sum =
                    group.all_reduce_async(Buffer::from_slice(&[1f32; 1 << 18]), ReduceOp::Sum).unwrap();
                let sent =
                    others.iter().map(|peer| group.isend(message(rank, *peer, 0, 1 << 20), *peer).unwrap());
                let sent: Vec<_> = sent.collect();
                assert_eq!(sum.wait().unwrap().as_slice::<f32>().unwrap()[77], world as f32);
                for (peer, work) in others.iter().zip(received) {
                    check(work.wait(), *peer, rank, 0, 1 << 20);
                }
                sent.into_iter().for_each(|work| drop(work.wait().unwrap()));
                group.barrier().unwrap();
            });
        }
    }
}

#[test]
fn threads_of_a_rank_send_and_receive_side_by_side() {
    for fabric in Fabric::ALL {
        run(3, fabric, |group| {
            let (group, rank) = (patient(&group), group.rank());
            std::thread::scope(|scope| {
                for peer in group.world_size().ranks().filter(|peer| *peer != rank) {
                    let group = &group;
                    scope.spawn(move || {
                        for number in 0..200 {
                            let own = message(rank, peer, number, number * 97);
                            group.send::<u8>(own.as_slice().unwrap(), peer).unwrap();
                        }
                    });
                    scope.spawn(move || {
                        for number in 0..200 {
                            let mut into = Buffer::zeroed(DType::U8, number * 97);
                            group.recv::<u8>(into.as_mut_slice().unwrap(), peer).unwrap();
                            check(Ok(into), peer, rank, number, number * 97);
                        }
                    });
                }
                scope.spawn(|| (0..50).for_each(|_| group.barrier().unwrap()));
            });
        });
    }
}

#[test]
fn two_ranks_that_both_send_first_are_told_so() {
    let both_send = |fabric| {
        let errors = run(2, fabric, |group| {
            // Enough for the other to begin on a busy machine.
            let hasty = group.with_timeout(Duration::from_secs(5));
            hasty.send(&vec![0u8; LONG], other(&group)).unwrap_err()
        });
        for error in errors {
            assert!(error.is_timeout(), "{fabric:?}: {error}");
            let text = error.to_string();
            assert!(text.contains(&format!("it has itself sent send/recv({LONG} x u8) #0")), "{text}");
            assert!(text.contains("batch_isend_irecv"), "{text}");
        }
    };
    std::thread::scope(|scope| {
        for fabric in [Fabric::Tcp, Fabric::SharedMemory] {
            scope.spawn(move || both_send(fabric));
        }
    });
}

#[test]
fn a_message_that_nobody_sends_times_out_with_the_name_of_the_peer() {
    for fabric in Fabric::ALL {
        run(2, fabric, |group| {
            if !group.rank().is_main() {
                while group.failure().is_none() {
                    std::thread::yield_now();
                }
                return;
            }
            let start = Instant::now();
            let hasty = group.with_timeout(Duration::from_millis(200));
            let first = group.irecv(Buffer::zeroed(DType::F32, 5), Rank::new(1)).unwrap();
            // Its deadline passes although it stands behind one that has half an hour.
            let second = hasty.irecv(Buffer::zeroed(DType::F32, 6), Rank::new(1)).unwrap();
            let error = second.wait().unwrap_err();
            assert!(error.is_timeout() && error.peer() == Some(Rank::new(1)), "{fabric:?}: {error}");
            assert!(error.to_string().contains("send/recv(6 x f32) #1: rank 1"), "{error}");
            assert!(first.wait().unwrap_err().is_timeout());
            assert!(start.elapsed() < WAIT_LIMIT);
        });
        run(2, fabric, |group| {
            let hasty = group.with_timeout(Duration::from_millis(200));
            if group.rank().is_main() {
                let error = hasty.recv(&mut [0u8], Rank::new(1)).unwrap_err();
                assert!(error.is_timeout() && error.peer() == Some(Rank::new(1)), "{fabric:?}: {error}");
            } else {
                while group.failure().is_none() {
                    std::thread::yield_now();
                }
            }
        });
    }
}

#[test]
fn a_difference_shows_both_calls_to_both_ranks() {
    type Call = fn(&ProcessGroup, Rank) -> Result<()>;
    let calls: [(Call, Call); 3] = [
        (|group, to| group.send(&[0f32; 10], to), |group, from| group.recv(&mut [0f32; 11], from)),
        (
            |group, to| group.isend(Buffer::from_slice(&[0f32; 10]), to)?.wait().map(drop),
            |group, from| group.recv(&mut [0i32; 10], from),
        ),
        (
            |group, to| group.isend(Buffer::zeroed(DType::F64, LONG / 8), to)?.wait().map(drop),
            |group, from| group.irecv(Buffer::zeroed(DType::F64, 3), from)?.wait().map(drop),
        ),
    ];
    for fabric in Fabric::ALL {
        for (send, recv) in calls {
            let errors = run(2, fabric, |group| {
                let (group, peer) = (patient(&group), other(&group));
                let outcome = if group.rank().is_main() { send(&group, peer) } else { recv(&group, peer) };
                // A sender that is done learns of it in the next call.
                outcome.and_then(|()| group.barrier()).unwrap_err()
            });
            for error in errors {
                assert!(error.is_mismatch(), "{fabric:?}: {error}");
                let text = error.to_string();
                assert!(
                    text.contains("rank 1 calls send/recv(") && text.contains("rank 0 calls send/recv("),
                    "{text}"
                );
            }
        }
    }
}

#[test]
fn an_abort_ends_messages_in_flight_on_every_rank() {
    for fabric in Fabric::ALL {
        let started = Barrier::new(3);
        let errors = run(3, fabric, |group| {
            let group = patient(&group);
            let mut works: Vec<_> = group
                .world_size()
                .ranks()
                .filter(|peer| *peer != group.rank())
                .map(|peer| group.irecv(Buffer::zeroed(DType::U8, 100), peer).unwrap())
                .collect();
            started.wait();
            if group.rank().get() == 1 {
                std::thread::sleep(Duration::from_millis(30));
                works[0].abort(Error::aborted("enough"));
            }
            let last = works.pop().unwrap();
            let errors = works.into_iter().map(|work| work.wait().unwrap_err()).collect::<Vec<_>>();
            while !last.is_completed() {
                std::thread::yield_now();
            }
            let seen = last.error().unwrap();
            assert_eq!(last.wait().unwrap_err().to_string(), seen.to_string());
            assert!(
                group.isend(Buffer::zeroed(DType::U8, 1), Rank::new((group.rank().get() + 1) % 3)).is_err()
            );
            errors
        });
        for error in errors.into_iter().flatten() {
            assert!(error.is_aborted() && error.to_string().contains("enough"), "{fabric:?}: {error}");
        }
    }
}

#[test]
fn who_waits_for_a_rank_that_has_left_is_told_and_gets_what_it_sent_before() {
    for fabric in Fabric::ALL {
        run(2, fabric, |group| {
            let (group, peer) = (patient(&group), other(&group));
            if group.rank().is_main() {
                // Short enough for every transport to take it without its receiver.
                group.send(&[7u8; 5000], peer).unwrap();
                drop(group.isend(Buffer::from_slice(&[8u8; 5000]), peer).unwrap());
                return;
            }
            std::thread::sleep(Duration::from_millis(50));
            let (mut first, mut second) = ([0u8; 5000], [0u8; 5000]);
            group.recv(&mut first, peer).unwrap();
            group.recv(&mut second, peer).unwrap();
            assert_eq!((first, second), ([7; 5000], [8; 5000]));
            let start = Instant::now();
            let work = group.irecv(Buffer::zeroed(DType::U8, 1), peer).unwrap();
            let error = work.wait().unwrap_err();
            assert!(error.is_peer_left(), "{fabric:?}: {error}");
            assert!(start.elapsed() < WAIT_LIMIT);
        });
    }
}

#[test]
fn a_work_that_is_waited_for_too_briefly_comes_back() {
    run(2, Fabric::Tcp, |group| {
        let peer = other(&group);
        if group.rank().is_main() {
            let work = group.irecv(Buffer::zeroed(DType::U8, 3), peer).unwrap();
            let work = work.wait_timeout(Duration::from_millis(5)).unwrap_err();
            assert!(!work.is_completed() && work.error().is_none());
            group.barrier().unwrap();
            assert_eq!(work.wait().unwrap().as_slice::<u8>().unwrap(), [1, 2, 3]);
        } else {
            group.barrier().unwrap();
            group.send(&[1u8, 2, 3], peer).unwrap();
        }
    });
}

#[test]
fn a_batch_with_a_stranger_starts_nothing() {
    run(2, Fabric::Tcp, |group| {
        let peer = other(&group);
        let batch = vec![
            P2pOp::send(Buffer::zeroed(DType::U8, 1), peer),
            P2pOp::recv(Buffer::zeroed(DType::U8, 1), group.rank()),
        ];
        assert!(group.batch_isend_irecv(batch).unwrap_err().is_invalid_argument());
        assert!(group.batch_isend_irecv(Vec::new()).unwrap().is_empty());
        let batch = vec![
            P2pOp::send(Buffer::from_slice(&[5u8]), peer),
            P2pOp::recv(Buffer::zeroed(DType::U8, 1), peer),
        ];
        let got = group.batch_isend_irecv(batch).unwrap().pop().unwrap().wait().unwrap();
        assert_eq!(got.as_slice::<u8>().unwrap(), [5]);
    });
}

#[test]
fn a_world_of_one_has_nobody_to_write_to() {
    let group = ProcessGroup::alone().unwrap();
    assert!(group.isend(Buffer::zeroed(DType::U8, 1), Rank::MAIN).unwrap_err().is_invalid_argument());
    assert!(group.recv(&mut [0u8], Rank::new(1)).unwrap_err().is_invalid_argument());
}

/// A message of a random schedule.
#[derive(Clone, Debug)]
struct Planned {
    from: u32,
    to: u32,
    length: usize,
}

/// A world, and its messages in an order of which each rank calls its part.
fn schedules() -> impl Strategy<Value = (u32, Vec<Planned>)> {
    (2u32..=4).prop_flat_map(|world| {
        let length = prop_oneof![Just(0usize), 1..200usize, 100_000..700_000usize];
        let message = (0..world, 1..world, length).prop_map(move |(from, distance, length)| Planned {
            from,
            to: (from + distance) % world,
            length,
        });
        (Just(world), prop::collection::vec(message, 0..40))
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// Every rank starts all its sends and receives, in any order, with collectives in between: all of them end.
    #[test]
    fn every_schedule_ends((world, plan) in schedules(), seed in any::<u64>()) {
        for fabric in Fabric::ALL {
            run(world, fabric, |group| {
                let (group, rank) = (patient(&group), group.rank());
                let (mut sent, mut received) = (Vec::new(), Vec::new());
                let turned = seed.rotate_left(rank.get() * 8);
                for (number, Planned { from, to, length }) in plan.iter().enumerate() {
                    let (from, to) = (Rank::new(*from), Rank::new(*to));
                    let blocks = turned >> (number % 60) & 1 == 1;
                    if from == rank {
                        // A send that blocks could wait for a receive that is called later.
                        sent.push(group.isend(message(from, to, number, *length), to).unwrap());
                    } else if to == rank && blocks {
                        let mut into = Buffer::zeroed(DType::U8, *length);
                        group.recv::<u8>(into.as_mut_slice().unwrap(), from).unwrap();
                        check(Ok(into), from, to, number, *length);
                    } else if to == rank {
                        let into = Buffer::zeroed(DType::U8, *length);
                        received.push((from, number, *length, group.irecv(into, from).unwrap()));
                    }
                    if number % 10 == 9 {
                        group.barrier().unwrap();
                    }
                }
                for (from, number, length, work) in received {
                    check(work.wait(), from, rank, number, length);
                }
                sent.into_iter().for_each(|work| drop(work.wait().unwrap()));
            });
        }
    }
}
