use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::*;
use crate::credentials::Credentials;
use crate::dtype::DType;
use crate::group::connect::TransportOptions;
use crate::group::{Connected, ProcessGroup, connect_in_process};
use crate::interrupt::interruptible;
use crate::testing::{self, Fabric, groups_of};
use crate::transport::TransportKind;
use crate::world_size::WorldSize;

const LIMIT: Duration = Duration::from_secs(20);
const SHORT_TIMEOUT: Duration = Duration::from_millis(200);
const LENGTH: usize = 1 << 27;
/// Senders of these tests offer payloads of so many bytes and more.
const OFFERED: usize = 256 << 10;

/// Two ranks that share memory. The first offers its payloads.
fn offering() -> Vec<ProcessGroup> {
    let groups = groups(&[on("a"); 2]);
    line(&groups[0].inner.messages.shared.outbound, Rank::new(1)).unwrap().end().offer_from(OFFERED);
    groups
}

/// The groups of ranks with these options.
fn groups(options: &[TransportOptions<'_>]) -> Vec<ProcessGroup> {
    groups_of(options, Credentials::none()).unwrap()
}

fn on(host: &str) -> TransportOptions<'_> {
    TransportOptions { host: Some(host), ..TransportOptions::default() }
}

#[test]
fn a_rank_polls_memory_for_longer_than_a_sleeping_peer_takes_to_wake() {
    let polling = Polling::default();
    let (mut polls, began) = (Polls::default(), Instant::now());
    while polls.go_on(&polling, true) {}
    assert!(began.elapsed() > Duration::from_micros(150), "{:?}", began.elapsed());
    // Once it has slept, it polls no more in this wait.
    assert!(!polls.go_on(&polling, true));
}

#[test]
fn a_process_that_was_forked_from_a_rank_s_does_not_wait_for_its_messages() {
    let mut ranks = connect_in_process(WorldSize::new(2).unwrap());
    let _other = ranks.pop();
    let Connected { messages, health, .. } = ranks.pop().unwrap();
    let (local, trace) = (LocalRank { rank: 0, world_size: 1 }, Trace::disabled());
    let mut messages = Messages::new(Rank::MAIN, Generation::default(), messages, health, local, trace);
    let received = P2pOp::recv(Buffer::zeroed(DType::U8, 1), Rank::new(1));
    drop(messages.start(vec![received], Deadline::after(10 * LIMIT)).unwrap());
    // Of no process.
    messages.process = 0;
    let (left, leaves) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        drop(messages);
        left.send(()).unwrap();
    });
    leaves.recv_timeout(LIMIT).unwrap();
}

#[test]
fn each_pair_has_its_own_transport_and_all_of_them_move_at_once() {
    let groups = groups(&[on("a"), on("b"), on("a")]);
    std::thread::scope(|scope| {
        for group in &groups {
            let group = group.with_timeout(LIMIT);
            scope.spawn(move || {
                let rank = group.rank();
                let others = || group.world_size().ranks().filter(|peer| *peer != rank);
                for peer in others() {
                    let end = line(&group.inner.messages.shared.inbound, peer).unwrap().end();
                    assert_eq!(end.socket().is_none(), rank.get() != 1 && peer.get() != 1);
                }
                for length in [1, 1000, 5 << 20] {
                    let own = || Buffer::from_slice(&vec![rank.get() as u8; length]);
                    let sent = others().map(|to| P2pOp::send(own(), to));
                    let received = others().map(|from| P2pOp::recv(Buffer::zeroed(DType::U8, length), from));
                    let works = group.batch_isend_irecv(sent.chain(received).collect()).unwrap();
                    for (from, work) in others().zip(works.into_iter().skip(2)) {
                        let got = work.wait().unwrap();
                        assert!(got.as_bytes().iter().all(|byte| u32::from(*byte) == from.get()));
                    }
                }
            });
        }
    });
}

#[test]
fn short_messages_arrive_whole_in_the_line_of_their_header_or_behind_it() {
    const LENGTHS: [usize; 12] = [0, 1, 4, 15, 16, 17, 48, 63, 64, 65, 128, 129];
    let groups = groups(&[on("a"); 2]);
    let text =
        |length: usize, round: usize| -> Vec<u8> { (1..=length).map(|at| (at + round) as u8).collect() };
    std::thread::scope(|scope| {
        let [sender, receiver] = &groups[..] else { panic!("two ranks") };
        scope.spawn(move || {
            let sender = sender.with_timeout(LIMIT);
            for round in 0..3 {
                for length in LENGTHS {
                    sender.send(&text(length, round), Rank::new(1)).unwrap();
                    sender
                        .isend(Buffer::from_slice(&text(length, round)), Rank::new(1))
                        .unwrap()
                        .wait()
                        .unwrap();
                }
            }
        });
        let receiver = receiver.with_timeout(LIMIT);
        for round in 0..3 {
            for length in LENGTHS {
                let mut got = vec![0u8; length];
                receiver.recv(&mut got, Rank::MAIN).unwrap();
                assert_eq!(got, text(length, round));
                let got = receiver.irecv(Buffer::zeroed(DType::U8, length), Rank::MAIN).unwrap();
                assert_eq!(got.wait().unwrap().as_bytes(), text(length, round));
            }
        }
    });
}

#[test]
fn long_messages_are_copied_once_and_go_through_the_ring_where_the_kernel_forbids_it() {
    for may_copy in [true, false] {
        let groups = offering();
        let text = |length: usize| -> Vec<u8> { (0..length).map(|at| (at % 251) as u8).collect() };
        let lengths = [OFFERED - 1, OFFERED, OFFERED + 1, OFFERED + (2 << 20) + 12345];
        let [sender, receiver] = &groups[..] else { panic!("two ranks") };
        if !may_copy {
            line(&receiver.inner.messages.shared.inbound, Rank::MAIN).unwrap().end().may_not_copy();
        }
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let sender = sender.with_timeout(LIMIT);
                for length in lengths {
                    sender.send(&text(length), Rank::new(1)).unwrap();
                    let sent = Buffer::from_slice(&text(length));
                    // What is called after a long message waits for it, and does not overtake it.
                    let works = [
                        P2pOp::send(sent, Rank::new(1)),
                        P2pOp::send(Buffer::from_slice(&[7u8]), Rank::new(1)),
                    ];
                    let works = sender.batch_isend_irecv(works.into()).unwrap();
                    works.into_iter().for_each(|work| drop(work.wait().unwrap()));
                }
                let end = line(&sender.inner.messages.shared.outbound, Rank::new(1)).unwrap().end();
                assert_eq!(end.offers(), may_copy, "once refused, nothing is offered again");
            });
            let receiver = receiver.with_timeout(LIMIT);
            for length in lengths {
                let mut got = vec![0u8; length];
                receiver.recv(&mut got, Rank::MAIN).unwrap();
                assert!(got == text(length), "{length} bytes");
                let got = receiver.irecv(Buffer::zeroed(DType::U8, length), Rank::MAIN).unwrap();
                assert!(got.wait().unwrap().as_bytes() == text(length), "{length} bytes");
                let mut after = [0u8];
                receiver.recv(&mut after, Rank::MAIN).unwrap();
                assert_eq!(after, [7]);
            }
        });
    }
}

/// As users have it: the senders of the other tests offer all long payloads, on any processor.
#[test]
fn payloads_of_the_lengths_for_which_one_copy_is_sooner_are_offered_and_others_go_into_the_ring() {
    let is_sooner = !phalanx_sys::processors::rereads_slowly();
    let (first, last) = (256 << 10, 1 << 20);
    for (length, offered) in [(first - 1, false), (first, is_sooner), (last, is_sooner), (last + 1, false)] {
        let groups = groups(&[on("a"); 2]);
        let [sender, receiver] = &groups[..] else { panic!("two ranks") };
        let mut out = line(&sender.inner.messages.shared.outbound, Rank::new(1)).unwrap().end();
        let mut into = line(&receiver.inner.messages.shared.inbound, Rank::MAIN).unwrap().end();
        let long: Vec<u8> = (0..length).map(|at| (at % 251) as u8).collect();
        let (mut sent, mut got) = (Sending::new(header(sender, 0, length)), vec![0u8; length]);
        let mut received = Receiving::new(Rank::new(1), header(receiver, 0, length));
        assert_eq!(out.push(&mut sent, &[&long]).unwrap(), Step::Moved);
        // One that has offered waits for an answer, and not for room.
        assert_eq!(out.is_ready(), !offered, "{length} bytes");
        while into.pull(&mut received, &mut got).unwrap() != Step::Done {
            out.push(&mut sent, &[&long]).unwrap();
        }
        assert!(got == long, "{length} bytes");
    }
}

#[test]
fn messages_that_are_long_for_a_ring_or_for_the_caches_arrive_at_any_place_in_memory() {
    let groups = groups(&[on("a"); 2]);
    let text = |length: usize| -> Vec<u8> { (0..length).map(|at| (at % 251) as u8).collect() };
    let lengths = [(1 << 20) + 1, (2 << 20) + 77, (32 << 20) + 12_345];
    std::thread::scope(|scope| {
        let [sender, receiver] = &groups[..] else { panic!("two ranks") };
        scope.spawn(move || {
            let sender = sender.with_timeout(LIMIT);
            lengths.iter().for_each(|length| sender.send(&text(*length), Rank::new(1)).unwrap());
        });
        let receiver = receiver.with_timeout(LIMIT);
        for (place, length) in lengths.into_iter().enumerate() {
            let mut memory = vec![7u8; length + 10];
            receiver.recv(&mut memory[place..place + length], Rank::MAIN).unwrap();
            assert!(memory[place..place + length] == text(length), "{length} bytes");
            let around = memory[..place].iter().chain(&memory[place + length..]);
            assert!(around.into_iter().all(|byte| *byte == 7), "{length} bytes");
        }
    });
}

#[test]
fn what_a_sender_has_given_up_is_not_received() {
    let groups = offering();
    let [sender, receiver] = &groups[..] else { panic!("two ranks") };
    let mut sent = vec![1u8; OFFERED + (2 << 20)];
    let error = sender.with_timeout(SHORT_TIMEOUT).send(&sent, Rank::new(1)).unwrap_err();
    assert!(error.is_timeout(), "{error}");
    sent.fill(2);
    // The end alone: the call would fail before it looks.
    let mut frame = Receiving::new(Rank::new(1), header(receiver, 0, sent.len()));
    let mut got = vec![0u8; sent.len()];
    let mut end = line(&receiver.inner.messages.shared.inbound, Rank::MAIN).unwrap().end();
    for _ in 0..10 {
        assert_ne!(end.pull(&mut frame, &mut got).unwrap(), Step::Done);
        let mut sending = line(&sender.inner.messages.shared.outbound, Rank::new(1)).unwrap().end();
        assert!(sending.is_ready(), "it is refused with the first piece");
    }
}

/// The header of a message of so many bytes.
fn header(group: &ProcessGroup, number: u64, length: usize) -> Header {
    group.inner.messages.shared.header(Call::new(Operation::PointToPoint, DType::U8, length), number, length)
}

/// A sender that sleeps until its end is ready must neither sleep when it is, nor be woken when it is not.
#[test]
fn an_end_that_sends_a_long_message_is_ready_for_what_comes_next() {
    let groups = offering();
    let [sender, receiver] = &groups[..] else { panic!("two ranks") };
    let mut out = line(&sender.inner.messages.shared.outbound, Rank::new(1)).unwrap().end();
    let mut into = line(&receiver.inner.messages.shared.inbound, Rank::MAIN).unwrap().end();
    let mut receive = |number, length: usize| {
        let (mut frame, mut got) =
            (Receiving::new(Rank::new(1), header(receiver, number, length)), vec![0u8; length]);
        assert_eq!(into.pull(&mut frame, &mut got).unwrap(), Step::Done);
        got
    };
    let mut short = 0;
    while out.push(&mut Sending::new(header(sender, short, 1)), &[&[1u8]]).unwrap() == Step::Done {
        short += 1;
    }
    let long = vec![2u8; OFFERED];
    let mut frame = Sending::new(header(sender, short, OFFERED));
    assert_eq!(out.push(&mut frame, &[&long]).unwrap(), Step::Idle);
    assert!(!out.is_ready(), "the ring is full");
    assert_eq!(receive(0, 1), [1]);
    assert!(out.is_ready(), "there is room for its header");
    assert_eq!(out.push(&mut frame, &[&long]).unwrap(), Step::Moved);
    assert!(!out.is_ready(), "it waits for an answer");
    (1..short).for_each(|number| assert_eq!(receive(number, 1), [1]));
    assert!(!out.is_ready(), "it waits for no room");
    assert!(receive(short, OFFERED) == long);
    assert!(out.is_ready());
    assert_eq!(out.push(&mut frame, &[&long]).unwrap(), Step::Done);
}

#[test]
fn a_process_that_was_forked_offers_none_of_its_memory() {
    let groups = offering();
    let [sender, receiver] = &groups[..] else { panic!("two ranks") };
    let mut out = line(&sender.inner.messages.shared.outbound, Rank::new(1)).unwrap().end();
    out.is_of_another_process();
    let mut into = line(&receiver.inner.messages.shared.inbound, Rank::MAIN).unwrap().end();
    let long: Vec<u8> = (0..OFFERED).map(|at| (at % 251) as u8).collect();
    let (mut sent, mut got) = (Sending::new(header(sender, 0, OFFERED)), vec![0u8; OFFERED]);
    let mut received = Receiving::new(Rank::new(1), header(receiver, 0, OFFERED));
    assert_eq!(out.push(&mut sent, &[&long]).unwrap(), Step::Moved);
    assert!(out.is_ready(), "what follows goes into the ring");
    while into.pull(&mut received, &mut got).unwrap() != Step::Done {
        out.push(&mut sent, &[&long]).unwrap();
    }
    assert!(got == long);
}

#[test]
fn a_message_of_several_parts_goes_through_the_ring() {
    let groups = offering();
    let [sender, receiver] = &groups[..] else { panic!("two ranks") };
    let mut out = line(&sender.inner.messages.shared.outbound, Rank::new(1)).unwrap().end();
    let mut into = line(&receiver.inner.messages.shared.inbound, Rank::MAIN).unwrap().end();
    let (part, length) = (vec![3u8; OFFERED], 2 * OFFERED + 5);
    let parts: [&[u8]; 3] = [&[3; 5], &part, &part];
    let (mut sent, mut got) = (Sending::new(header(sender, 0, length)), vec![0u8; length]);
    let mut received = Receiving::new(Rank::new(1), header(receiver, 0, length));
    assert_eq!(out.push(&mut sent, &parts).unwrap(), Step::Moved);
    assert!(out.is_ready(), "an offer would be one piece of memory");
    while into.pull(&mut received, &mut got).unwrap() != Step::Done {
        out.push(&mut sent, &parts).unwrap();
    }
    assert!(got == vec![3; length]);
}

#[test]
fn a_message_that_moves_all_the_time_is_ended_by_the_program_s_check() {
    fn ends() -> Result<()> {
        Err(Error::aborted("enough"))
    }
    let groups = groups(&[on("a"); 2]);
    let shared = &groups[0].inner.messages.shared;
    let line = line(&shared.outbound, Rank::new(1)).unwrap();
    let timeout: Timeout = Deadline::after(LIMIT).into();
    let move_on = || shared.step_through(&mut line.driven(), &timeout, |_| Ok(Step::Moved));
    let error = interruptible(ends, move_on).unwrap_err();
    assert!(error.to_string().contains("enough"), "{error}");
}

#[test]
fn a_full_ring_takes_short_messages_when_there_is_room_again() {
    let groups = groups(&[on("a"); 2]);
    // More than a ring holds, and all of it before anything is received.
    const MESSAGES: i64 = 50_000;
    std::thread::scope(|scope| {
        let [sender, receiver] = &groups[..] else { panic!("two ranks") };
        scope.spawn(move || {
            let sender = sender.with_timeout(LIMIT);
            (0..MESSAGES).for_each(|number| sender.send(&[number], Rank::new(1)).unwrap());
        });
        std::thread::sleep(Duration::from_millis(100));
        let receiver = receiver.with_timeout(LIMIT);
        for number in 0..MESSAGES {
            let mut got = [0i64];
            receiver.recv(&mut got, Rank::MAIN).unwrap();
            assert_eq!(got, [number]);
        }
    });
}

/// The processor time of the threads with this name, in the kernel's ticks of 10 ms.
fn ticks_of(thread: &str) -> u64 {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let named = tasks.filter(|task| {
        std::fs::read_to_string(task.path().join("comm")).is_ok_and(|name| name.trim_end() == thread)
    });
    let ticks = named.filter_map(|task| {
        let stat = std::fs::read_to_string(task.path().join("stat")).ok()?;
        let fields: Vec<u64> =
            stat.rsplit(')').next()?.split_whitespace().skip(11).take(2).flat_map(str::parse).collect();
        Some(fields.iter().sum::<u64>())
    });
    ticks.sum()
}

#[test]
fn the_worker_sleeps_while_a_message_over_a_connection_is_awaited() {
    // No other test has a rank with this number.
    const RANKS: usize = 12;
    let tcp = TransportOptions { kind: Some(TransportKind::Tcp), ..TransportOptions::default() };
    let mut groups = groups(&[tcp; RANKS]);
    let (last, main) = (groups.pop().unwrap(), groups.swap_remove(0));
    let (from, to) = (main.rank(), last.rank());
    let name = format!("phalanx-p2p-{to}");
    let received = || last.irecv(Buffer::zeroed(DType::U8, 1), from).unwrap();
    let send = || main.send(&[7u8], to).unwrap();
    let first = received();
    send();
    first.wait().unwrap();
    // What wakes it from its idle sleep must not wake it again and again.
    while !last.inner.messages.shared.queue.lock().asleep {
        std::thread::sleep(Duration::from_millis(1));
    }
    let second = received();
    let before = ticks_of(&name);
    std::thread::sleep(Duration::from_millis(500));
    let took = ticks_of(&name) - before;
    send();
    second.wait().unwrap();
    assert!(took < 5, "it ran for {took} ticks of 50");
    // Nor does the end of the group, which waits for what is in flight.
    let third = received();
    let leaving = std::thread::spawn(move || drop(last));
    let before = ticks_of(&name);
    std::thread::sleep(Duration::from_millis(500));
    let took = ticks_of(&name) - before;
    send();
    third.wait().unwrap();
    assert!(took < 5, "it ran for {took} ticks of 50 while its group was dropped");
    drop((main, groups));
    leaving.join().unwrap();
}

#[test]
fn calls_behind_a_worker_that_panicked_end_at_once() {
    struct Panics;
    impl std::task::Wake for Panics {
        fn wake(self: Arc<Self>) {
            panic!("a test's executor");
        }
    }
    let tcp = TransportOptions { kind: Some(TransportKind::Tcp), ..TransportOptions::default() };
    let mut groups = groups(&[tcp; 3]);
    let other = groups.pop().unwrap();
    let (sender, main) = (groups.pop().unwrap(), groups.pop().unwrap());
    let byte = || Buffer::zeroed(DType::U8, 1);
    let mut polled = main.irecv(byte(), sender.rank()).unwrap();
    let waker = std::task::Waker::from(Arc::new(Panics));
    let mut context = std::task::Context::from_waker(&waker);
    assert!(std::pin::Pin::new(&mut polled).poll(&mut context).is_pending());
    let open = main.irecv(byte(), other.rank()).unwrap();
    std::thread::scope(|scope| {
        let behind = scope.spawn(|| {
            let start = Instant::now();
            (main.recv(&mut [0u8], other.rank()).unwrap_err(), start.elapsed())
        });
        // It is about to wait for its turn.
        std::thread::sleep(Duration::from_millis(200));
        sender.send(&[1u8], Rank::MAIN).unwrap();
        let (error, took) = behind.join().unwrap();
        assert!(took < LIMIT, "it took {took:?}");
        assert!(error.to_string().contains("the worker for messages panicked"), "{error}");
    });
    assert!(open.wait().is_err());
}

#[test]
fn ranks_that_were_told_different_things_agree_on_tcp() {
    let tcp = TransportOptions { kind: Some(TransportKind::Tcp), ..TransportOptions::default() };
    for group in groups(&[tcp, TransportOptions::default()]) {
        assert_eq!(group.transport(), Some(TransportKind::Tcp));
        let peer = Rank::new(1 - group.rank().get());
        assert!(line(&group.inner.messages.shared.inbound, peer).unwrap().end().socket().is_some());
    }
}

/// The errors on rank 0 with a peer that sends arbitrary data after a header, until the rank has given up: over shared memory and over TCP, for
/// a blocking and for an asynchronous receive.
fn received_from(timeout: Duration, peer: impl Fn(&mut Outbound, &AtomicBool) + Sync) -> [Error; 4] {
    [(None, false), (None, true), (Some(TransportKind::Tcp), false), (Some(TransportKind::Tcp), true)].map(
        |(kind, blocks)| {
            let over = AtomicBool::new(false);
            let mut groups = groups(&[TransportOptions { kind, ..TransportOptions::default() }; 2]);
            let (one, main) = (groups.pop().unwrap(), groups.pop().unwrap());
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    let call = Call::new(Operation::PointToPoint, DType::U8, LENGTH);
                    let mut head = [0; 64];
                    head[..48].copy_from_slice(&one.inner.messages.shared.header(call, 0, LENGTH).encode());
                    let mut end = line(&one.inner.messages.shared.outbound, Rank::MAIN).unwrap().end();
                    // A ring takes whole lines.
                    end.push_raw(if kind.is_none() { &head } else { &head[..48] });
                    peer(&mut end, &over);
                    drop(end);
                    drop(one);
                });
                let main = main.with_timeout(timeout);
                let start = Instant::now();
                let error = match blocks {
                    true => main.recv(&mut vec![0u8; LENGTH], Rank::new(1)).unwrap_err(),
                    false => {
                        let work = main.irecv(Buffer::zeroed(DType::U8, LENGTH), Rank::new(1)).unwrap();
                        work.wait().unwrap_err()
                    }
                };
                over.store(true, Ordering::Relaxed);
                assert!(start.elapsed() < LIMIT, "it took {:?}", start.elapsed());
                error
            })
        },
    )
}

#[test]
fn a_peer_that_stops_within_a_line_is_late() {
    let errors = received_from(SHORT_TIMEOUT, |line, over| {
        line.push_raw(&[1; 100]);
        while !over.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(1));
        }
    });
    for error in errors {
        assert!(error.is_timeout() && error.peer() == Some(Rank::new(1)), "{error}");
    }
}

/// What is short goes into a buffer, whether anybody reads it or not.
#[test]
fn nothing_counts_as_sent_to_a_rank_that_has_left() {
    type Sends = fn(&ProcessGroup, Rank) -> Result<()>;
    let messages: [Sends; 2] = [
        |group, to| group.send(&[7u8], to),
        |group, to| group.isend(Buffer::from_slice(&[7u8]), to)?.wait().map(drop),
    ];
    for fabric in Fabric::ALL {
        for (number, send) in messages.iter().enumerate() {
            let mut groups = testing::groups(2, fabric).unwrap();
            let to = groups.pop().unwrap().rank();
            let group = groups.pop().unwrap().with_timeout(LIMIT);
            let start = Instant::now();
            while !group.health().has_left(to) {
                assert!(start.elapsed() < LIMIT, "{fabric:?}");
                std::thread::yield_now();
            }
            let error = send(&group, to).unwrap_err();
            assert!(error.is_peer_left() && error.peer() == Some(to), "{fabric:?}, {number}: {error}");
        }
    }
}

#[test]
fn a_rank_that_has_left_has_ended_when_its_messages_are_received() {
    let until = |what: &dyn Fn() -> bool| {
        let start = Instant::now();
        while !what() {
            assert!(start.elapsed() < LIMIT);
            std::thread::yield_now();
        }
    };
    for fabric in Fabric::ALL {
        for sends in [false, true] {
            let mut groups = testing::groups(2, fabric).unwrap();
            let other = groups.pop().unwrap();
            let (group, from) = (groups.pop().unwrap().with_timeout(LIMIT), other.rank());
            assert!(!group.has_ended(from).unwrap());
            if sends {
                other.send(&[7u8], group.rank()).unwrap();
            }
            drop(other);
            until(&|| group.health().has_left(from));
            if sends {
                assert!(!group.has_ended(from).unwrap(), "{fabric:?}: a message is there");
                group.recv(&mut [0u8], from).unwrap();
            }
            until(&|| group.has_ended(from).unwrap());
            let error = group.recv(&mut [0u8], from).unwrap_err();
            assert!(error.is_peer_left() && error.peer() == Some(from), "{fabric:?}: {error}");
            assert!(group.has_ended(group.rank()).unwrap_err().is_invalid_argument());
        }
    }
}

#[test]
fn nothing_comes_any_more_when_all_others_have_left_and_what_they_sent_has_been_received() {
    let wait = |what: &dyn Fn() -> bool, of: Fabric| {
        let start = Instant::now();
        while !what() {
            assert!(start.elapsed() < LIMIT, "{of:?}");
            std::thread::yield_now();
        }
    };
    for fabric in Fabric::ALL {
        let mut groups = testing::groups(3, fabric).unwrap();
        let (last, middle) = (groups.pop().unwrap(), groups.pop().unwrap());
        let group = groups.pop().unwrap().with_timeout(LIMIT);
        let peers = [middle.rank(), last.rank()];
        std::thread::scope(|scope| {
            // Ranks that leave wait for each other in some of the fabrics.
            scope.spawn(move || {
                middle.with_timeout(LIMIT).send(&[7u8], Rank::MAIN).unwrap();
                drop(middle);
            });
            wait(&|| group.health().has_left(peers[0]), fabric);
            assert!(group.left_by_all().is_none(), "{fabric:?}: one is there");
            scope.spawn(move || drop(last));
            wait(&|| group.health().has_left(peers[1]), fabric);
            assert!(group.left_by_all().is_none(), "{fabric:?}: a message is there");
            let mut got = [0u8];
            group.recv(&mut got, peers[0]).unwrap();
            assert_eq!(got, [7]);
            wait(&|| group.left_by_all().is_some(), fabric);
        });
        let error = group.left_by_all().unwrap();
        assert!(error.is_peer_left() && error.peer() == Some(peers[0]), "{fabric:?}: {error}");
        assert!(peers.iter().all(|peer| error.to_string().contains(&format!("rank {peer} ("))), "{error}");
        assert!(group.failure().is_none(), "{fabric:?}");
    }
}

#[test]
fn a_peer_that_leaves_within_a_line_is_noticed() {
    for error in received_from(LIMIT, |line, _| line.push_raw(&[1; 100])) {
        assert!(error.is_peer_left() && error.peer() == Some(Rank::new(1)), "{error}");
    }
}

#[test]
fn a_peer_that_trickles_does_not_put_the_deadline_off() {
    let errors = received_from(SHORT_TIMEOUT, |line, over| {
        // Without a pause the whole payload would be there in time; with a sleep the rank would be idle.
        while !over.load(Ordering::Relaxed) {
            line.push_raw(&[1; 64]);
            let pause = Instant::now();
            while pause.elapsed() < Duration::from_micros(2) {}
        }
    });
    for error in errors {
        assert!(error.is_timeout() && error.peer() == Some(Rank::new(1)), "{error}");
    }
}
