//! Nodes that read the log at different speeds, fail, fall silent and wake up again.

use std::time::Duration;

use proptest::prelude::*;

use super::state::Running;
use super::*;
use crate::log::Machine;
use crate::log::liveness::Absence;

fn node(id: u64, workers: u32, node_rank: Option<u32>) -> Node {
    Node {
        id: NodeId(id),
        host: format!("host{id}"),
        workers,
        node_rank,
        serves_store: id == 0,
        process: None,
        role: "default".to_owned(),
    }
}

fn settings(min_nodes: u32, max_nodes: u32, max_restarts: u32) -> Settings {
    Settings { min_nodes, max_nodes, max_restarts }
}

fn joined(settings: Settings, nodes: impl IntoIterator<Item = Node>) -> MembershipState {
    let mut state = MembershipState::default();
    for node in nodes {
        state.apply(Entry::Join { node, settings }).unwrap();
    }
    state
}

fn failure(rank: u32, blames: Option<u32>) -> WorkerFailure {
    WorkerFailure { rank, blames, detail: Vec::new() }
}

fn failed(state: &mut MembershipState, id: u64, rank: u32, blames: Option<u32>) {
    let round = state.round();
    state.apply(Entry::Failed { round, node: NodeId(id), failure: failure(rank, blames) }).unwrap();
}

fn ended(state: &mut MembershipState, id: u64, succeeded: bool) {
    let round = state.round();
    state.apply(Entry::Ended { round, node: NodeId(id), succeeded }).unwrap();
}

fn left(state: &mut MembershipState, id: u64, why: Departure) {
    state.apply(Entry::Left { node: NodeId(id), why }).unwrap();
}

const SILENT: Departure = Departure::Silent(Duration::from_secs(5));

#[test]
fn node_ranks_are_those_asked_for_and_ranks_follow_the_workers() {
    let state = joined(settings(3, 3, 0), [node(2, 1, Some(2)), node(0, 2, Some(0)), node(1, 3, Some(1))]);
    let running = state.running().unwrap();
    let places: Vec<_> = running.members.iter().map(|member| (member.node.id.0, member.first_rank)).collect();
    assert_eq!((places, running.world_size()), (vec![(0, 0), (1, 2), (2, 5)], 6));
}

#[test]
fn ranks_in_a_role_follow_the_workers_of_that_role() {
    let role = |node: Node, role: &str| Node { role: role.to_owned(), ..node };
    let nodes = [
        role(node(0, 2, Some(0)), "trainer"),
        role(node(1, 3, Some(1)), "reader"),
        role(node(2, 1, Some(2)), "trainer"),
        role(node(3, 2, Some(3)), "reader"),
    ];
    let state = joined(settings(4, 4, 0), nodes);
    let running = state.running().unwrap();
    assert_eq!([0, 1, 2, 3, 4].map(|node| running.in_role(node)), [(0, 3), (0, 5), (2, 3), (3, 5), (0, 0)]);
}

#[test]
fn without_node_ranks_the_store_comes_first_and_then_who_came_first() {
    let state = joined(settings(3, 3, 0), [node(2, 1, None), node(1, 1, None), node(0, 1, None)]);
    let ids: Vec<_> = state.running().unwrap().members.iter().map(|member| member.node.id.0).collect();
    assert_eq!(ids, [0, 2, 1]);
}

#[test]
fn what_does_not_fit_is_refused_with_a_reason() {
    let mut state = joined(settings(2, 2, 0), [node(0, 1, Some(0))]);
    let mut refuse = |node, settings| state.apply(Entry::Join { node, settings }).unwrap_err();
    assert!(refuse(node(1, 1, Some(0)), settings(2, 2, 0)).contains("host0 and host1"));
    assert!(refuse(node(1, 1, Some(2)), settings(2, 2, 0)).contains("not below"));
    assert!(refuse(node(1, 1, Some(1)), settings(2, 3, 0)).contains("--nnodes 2:2"));
    assert!(refuse(node(1, 70_000, Some(1)), settings(2, 2, 0)).contains("65536"));
}

#[test]
fn settings_that_cannot_be_are_refused_and_bind_nobody() {
    let mut state = MembershipState::default();
    for (min, max) in [(0, 0), (0, 2), (3, 2)] {
        let why = state.apply(Entry::Join { node: node(0, 1, None), settings: settings(min, max, 0) });
        assert!(why.unwrap_err().contains(&format!("--nnodes {min}:{max}")));
    }
    assert_eq!(state, MembershipState::default());
    state.apply(Entry::Join { node: node(1, 1, None), settings: settings(1, 1, 0) }).unwrap();
    assert_eq!(state.running().map(Running::world_size), Some(1));
}

#[test]
fn the_key_of_heartbeats_is_that_of_whoever_comes_or_goes() {
    let heartbeats_of = MembershipState::COMPACTION.unwrap().heartbeats_of.unwrap();
    let settings = settings(1, 1, 0);
    let expected = Some((NodeId(10), "beat/000000000000000a".to_owned()));
    assert_eq!(heartbeats_of(&Entry::Join { node: node(10, 1, None), settings }), expected);
    assert_eq!(heartbeats_of(&Entry::Left { node: NodeId(10), why: SILENT }), expected);
    assert_eq!(heartbeats_of(&Entry::LastCall { round: 0, nonce: 0 }), None);
}

#[test]
fn all_must_succeed() {
    let mut state = joined(settings(2, 2, 0), [node(0, 1, None), node(1, 1, None)]);
    ended(&mut state, 1, true);
    assert!(!state.running().unwrap().ending);
    ended(&mut state, 0, true);
    assert_eq!(state.job_end(), Some(&JobEnd::Succeeded));
}

#[test]
fn few_watch_all_and_among_many_each_is_watched_by_a_few() {
    for count in [1_u64, 2, 16, 17, 200] {
        let size = count as u32;
        // None has number 0, which would serve the store.
        let mut state = joined(settings(size, size, 1), (1..=count).map(|id| node(7 * id, 1, None)));
        let watchers = |state: &MembershipState, id| {
            let all = state.present().map(|node| node.id);
            all.filter(|other| state.watched_by(*other).contains(&NodeId(id))).count() as u64
        };
        for id in (1..=count).map(|id| 7 * id) {
            let watched = state.watched_by(NodeId(id));
            assert!(!watched.contains(&NodeId(id)));
            assert_eq!(watched.len() as u64, if count <= 16 || id <= 21 { count - 1 } else { 4 });
        }
        // The first three watch all. The first is watched by the two others, and by the four before it.
        for (id, expected) in [(7, 6), (28, 4), (7 * count, 7)] {
            if count > 16 {
                assert_eq!(watchers(&state, id), expected, "{id}");
            }
        }
        // Whoever is gone is watched no more, and those after it take its place.
        if count > 20 {
            left(&mut state, 77, SILENT);
            assert_eq!(state.watched_by(NodeId(70)), [84, 91, 98, 105].map(NodeId));
            // Whoever watches all is replaced, too.
            left(&mut state, 7, SILENT);
            assert_eq!(state.watched_by(NodeId(28)).len(), 197);
        }
    }
    let state = joined(settings(100, 100, 1), (0..100).map(|id| node(id, 1, None)));
    assert_eq!(state.watched_by(NodeId(0)).len(), 99, "who serves the store watches all");
    assert_eq!(state.watched_by(NodeId(1)).len(), 4);
}

#[test]
fn who_serves_the_store_compacts_the_log_or_else_the_first_that_is_there() {
    let caretaker = |state: &MembershipState| (MembershipState::COMPACTION.unwrap().caretaker)(state);
    assert_eq!(caretaker(&MembershipState::default()), None);
    let state = joined(settings(1, 4, 1), [node(2, 1, None), node(0, 1, None), node(1, 1, None)]);
    assert_eq!(caretaker(&state), Some(NodeId(0)));
    let mut state = joined(settings(1, 3, 1), [guest(3), guest(2), guest(1)]);
    assert_eq!(caretaker(&state), Some(NodeId(3)));
    left(&mut state, 3, SILENT);
    assert_eq!(caretaker(&state), Some(NodeId(2)));
}

#[test]
fn a_state_to_which_no_log_leads_is_refused() {
    let compaction = MembershipState::COMPACTION.unwrap();
    let state = joined(settings(2, 2, 3), [guest(1), guest(2)]);
    let bytes = (compaction.encode)(&state).unwrap();
    assert_eq!((compaction.decode)(&bytes).unwrap(), state);
    // Version; settings, of which three restarts are the last; round; restarts.
    assert_eq!(bytes[..7], [2, 1, 2, 2, 3, 0, 0]);
    let changed = |at: usize, byte| {
        let mut bytes = bytes.clone();
        bytes[at] = byte;
        (compaction.decode)(&bytes).map_err(|error| error.to_string())
    };
    assert!(changed(6, 3).is_ok());
    assert!(changed(6, 4).unwrap_err().contains("the state in the launchers' log is not valid"));
    // Nobody joins without settings, or with those that cannot be, and no round has more nodes than they allow.
    let without_settings = [&[2, 0], &bytes[5..]].concat();
    assert!((compaction.decode)(&without_settings).is_err());
    for (at, byte) in [(2, 0), (2, 3), (3, 1)] {
        assert!(changed(at, byte).is_err(), "{at} {byte}");
    }
    let both_one = [&[2, 1, 1, 1], &bytes[4..]].concat();
    assert!((compaction.decode)(&both_one).is_err());
    // Without nodes a round would be over, and the job would have succeeded.
    let no_nodes = [2, 1, 2, 2, 3, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    assert!((compaction.decode)(&no_nodes).is_err());
    assert!(changed(0, 1).unwrap_err().contains("it is version 1, not 2"));
    for end in 0..bytes.len() {
        assert!((compaction.decode)(&bytes[..end]).is_err(), "{end}");
    }
}

#[test]
fn a_failure_ends_the_round_everywhere_and_the_next_begins_when_nobody_is_left() {
    let mut state = joined(settings(2, 2, 1), [node(0, 1, None), node(1, 1, None)]);
    failed(&mut state, 1, 1, None);
    ended(&mut state, 1, false);
    assert!(state.running().unwrap().ending && state.round() == 0);
    ended(&mut state, 0, false);
    assert_eq!((state.round(), state.restarts(), state.running().is_some()), (1, 1, true));
    assert_eq!(state.last_cause(), Some(&Cause::Worker(failure(1, None))));
    // Late entries of the former round are ignored.
    state.apply(Entry::Failed { round: 0, node: NodeId(0), failure: failure(0, None) }).unwrap();
    assert!(!state.running().unwrap().ending);

    failed(&mut state, 0, 0, None);
    ended(&mut state, 0, false);
    ended(&mut state, 1, false);
    assert_eq!(state.job_end(), Some(&JobEnd::Failed(Cause::Worker(failure(0, None)))));
}

#[test]
fn a_failure_after_which_no_round_follows_is_known_before_all_have_ended() {
    let started = |settings: Settings| joined(settings, [node(0, 1, None), node(1, 1, None)]);
    for (settings, is_decided) in [(settings(2, 2, 0), true), (settings(2, 2, 1), false)] {
        let mut state = started(settings);
        assert_eq!(state.decided(), None);
        failed(&mut state, 1, 1, None);
        let failure = Cause::Worker(failure(1, None));
        assert_eq!(state.decided(), is_decided.then(|| failure.clone()));
        // Whoever leaves meanwhile changes nothing.
        ended(&mut state, 1, false);
        left(&mut state, 1, Departure::Signal(2));
        assert_eq!(state.decided(), is_decided.then(|| failure.clone()));
        ended(&mut state, 0, false);
        assert_eq!(state.decided(), None);
        assert!(!is_decided || state.job_end() == Some(&JobEnd::Failed(failure)), "{state:?}");
    }
    // The others may go on without a node that leaves.
    let mut state = joined(settings(1, 2, 0), [node(0, 1, None), node(1, 1, None)]);
    failed(&mut state, 1, 1, None);
    assert_eq!(state.decided(), None);
    // A node that is gone is another matter.
    let mut state = started(settings(2, 2, 0));
    left(&mut state, 1, SILENT);
    assert_eq!(state.decided(), None);
}

#[test]
fn the_cause_lies_where_the_blame_ends() {
    let mut state = joined(settings(2, 2, 0), [node(0, 2, None), node(1, 2, None)]);
    failed(&mut state, 0, 1, Some(3));
    failed(&mut state, 1, 3, None);
    ended(&mut state, 0, false);
    ended(&mut state, 1, false);
    assert_eq!(state.job_end(), Some(&JobEnd::Failed(Cause::Worker(failure(3, None)))));
}

#[test]
fn later_news_of_a_failure_keep_its_turn() {
    let mut state = joined(settings(2, 2, 0), [node(0, 1, None), node(1, 1, None)]);
    failed(&mut state, 1, 1, Some(7));
    failed(&mut state, 0, 0, None);
    failed(&mut state, 1, 1, None);
    ended(&mut state, 0, false);
    ended(&mut state, 1, false);
    assert_eq!(state.job_end(), Some(&JobEnd::Failed(Cause::Worker(failure(1, None)))));
}

#[test]
fn a_silent_node_is_the_cause_of_what_others_saw() {
    for blames in [None, Some(2)] {
        let mut state = joined(settings(2, 2, 0), [node(0, 2, None), node(1, 2, None)]);
        failed(&mut state, 0, 1, blames);
        ended(&mut state, 0, false);
        assert_eq!(state.job_end(), None);
        left(&mut state, 1, SILENT);
        let cause = Cause::Node { node: node(1, 2, None), node_rank: Some(1), why: SILENT };
        assert_eq!(state.job_end(), Some(&JobEnd::Failed(cause)));
    }
}

#[test]
fn with_restarts_left_a_lost_node_is_replaced() {
    let mut state = joined(settings(2, 2, 1), [node(0, 1, Some(0)), node(1, 1, Some(1))]);
    left(&mut state, 1, SILENT);
    ended(&mut state, 0, false);
    assert!(state.is_gathering() && state.restarts() == 1);
    state.apply(Entry::Join { node: node(5, 1, Some(1)), settings: settings(2, 2, 1) }).unwrap();
    assert_eq!(state.running().and_then(|running| running.node_rank(NodeId(5))), Some(1));
}

#[test]
fn a_launcher_that_was_started_again_takes_its_own_place() {
    let mut state = joined(settings(2, 2, 1), [node(0, 1, Some(0)), node(1, 1, Some(1))]);
    let again = |id, host: &str, rank| Node { host: host.to_owned(), ..node(id, 1, Some(rank)) };
    // Another host, another rank, and the one that serves the store are no predecessors; nor is a node its own.
    for other in [again(5, "host5", 1), again(5, "host1", 0), again(5, "host0", 0), node(1, 1, Some(1))] {
        assert_eq!(state.predecessor(&other), None, "{other:?}");
    }
    assert_eq!(state.predecessor(&Node { node_rank: None, ..again(5, "host1", 1) }), None);
    let new = again(5, "host1", 1);
    let join = || Entry::Join { node: new.clone(), settings: settings(2, 2, 1) };
    // Without a word about the earlier one it may be a second launcher with the wrong rank.
    assert!(state.apply(join()).unwrap_err().contains("two nodes have --node-rank 1"));
    let old = state.predecessor(&new).map(|old| old.id).unwrap();
    assert_eq!(old, NodeId(1));
    assert!(!state.takes(&new, &settings(2, 2, 1)));
    left(&mut state, 1, Departure::Replaced);
    assert!(state.takes(&new, &settings(2, 2, 1)) && !state.takes(&new, &settings(3, 3, 1)));
    state.apply(join()).unwrap();
    ended(&mut state, 0, false);
    let running = state.running().unwrap();
    assert_eq!((running.node_rank(NodeId(5)), running.members.len(), state.restarts()), (Some(1), 2, 1));
}

#[test]
fn a_newcomer_costs_no_restart() {
    let mut state = joined(settings(1, 2, 0), [node(0, 1, None)]);
    assert!(state.has_enough() && state.is_gathering());
    state.apply(Entry::LastCall { round: 0, nonce: 0 }).unwrap();
    state.apply(Entry::Join { node: node(1, 1, None), settings: settings(1, 2, 0) }).unwrap();
    assert!(state.running().unwrap().ending);
    ended(&mut state, 0, false);
    assert_eq!((state.running().unwrap().members.len(), state.restarts()), (2, 0));
    // Nor does one that is told to go.
    left(&mut state, 1, Departure::Signal(15));
    ended(&mut state, 0, false);
    assert_eq!((state.is_gathering(), state.restarts(), state.waiting().len()), (true, 0, 1));
}

#[test]
fn a_node_that_leaves_costs_no_restart_whatever_is_heard_first() {
    let (settings, term) = (settings(2, 3, 0), Departure::Signal(15));
    let start = || joined(settings, [node(0, 1, None), node(1, 1, None), node(2, 1, None)]);
    let end = |mut state: MembershipState| {
        left(&mut state, 1, term.clone());
        ended(&mut state, 0, false);
        ended(&mut state, 2, false);
        state
    };
    // The workers of other nodes fail without it, and say so before it has said that it leaves; some blame nobody, and some its worker. Or
    // its own worker got the signal, too.
    let reports: [&[(u64, u32, Option<u32>)]; 5] = [
        &[(0, 0, None)],
        &[(0, 0, None), (2, 2, None)],
        &[(0, 0, Some(1)), (2, 2, Some(1))],
        &[(1, 1, None), (0, 0, Some(1))],
        &[(0, 0, Some(1)), (1, 1, None), (2, 2, None)],
    ];
    for report in reports {
        let mut state = start();
        report.iter().for_each(|(id, rank, blames)| failed(&mut state, *id, *rank, *blames));
        let state = end(state);
        assert_eq!((state.job_end(), state.restarts(), state.is_gathering()), (None, 0, true), "{report:?}");
        let cause = Cause::Node { node: node(1, 1, None), node_rank: Some(1), why: term.clone() };
        assert_eq!(state.last_cause(), Some(&cause), "{report:?}");
    }
    // A worker that the others have seen fail costs what it costs, whoever leaves then.
    let mut state = start();
    failed(&mut state, 2, 2, None);
    failed(&mut state, 0, 0, Some(2));
    assert_eq!(end(state).job_end(), Some(&JobEnd::Failed(Cause::Worker(failure(2, None)))));
    // So does one where the nodes that stay are too few.
    let settings = self::settings(3, 3, 1);
    let mut state = joined(settings, [node(0, 1, None), node(1, 1, None), node(2, 1, None)]);
    failed(&mut state, 0, 0, None);
    assert_eq!(end(state).restarts(), 1);
}

#[test]
fn workers_that_fail_because_others_have_ended_for_a_newcomer_cost_no_restart() {
    let settings = settings(2, 3, 0);
    let mut state = joined(settings, [node(0, 1, None), node(1, 1, None)]);
    state.apply(Entry::LastCall { round: 0, nonce: 0 }).unwrap();
    state.apply(Entry::Join { node: node(2, 1, None), settings }).unwrap();
    // Node 1 has ended its workers; node 0 has not read yet why, and its worker fails without them.
    ended(&mut state, 1, false);
    for blames in [None, Some(1)] {
        failed(&mut state, 0, 0, blames);
    }
    ended(&mut state, 0, false);
    assert_eq!((state.job_end(), state.last_cause(), state.restarts(), state.round()), (None, None, 0, 1));
    assert_eq!(state.running().unwrap().members.len(), 3);
    // A failure that was there first costs what it costs, whoever comes meanwhile.
    let mut state = joined(settings, [node(0, 1, None), node(1, 1, None)]);
    state.apply(Entry::LastCall { round: 0, nonce: 0 }).unwrap();
    failed(&mut state, 0, 0, None);
    state.apply(Entry::Join { node: node(2, 1, None), settings }).unwrap();
    ended(&mut state, 0, false);
    ended(&mut state, 1, false);
    assert!(matches!(state.job_end(), Some(JobEnd::Failed(Cause::Worker(_)))));
}

#[test]
fn nothing_goes_on_without_the_store() {
    let mut state = joined(settings(1, 2, 9), [node(0, 1, None), node(1, 1, None)]);
    left(&mut state, 0, Departure::Signal(2));
    assert!(matches!(state.job_end(), Some(JobEnd::Failed(Cause::Node { .. }))));
}

/// The same node in a log that no launcher serves.
fn guest(id: u64) -> Node {
    Node { serves_store: false, ..node(id, 1, None) }
}

#[test]
fn where_no_launcher_serves_the_log_the_first_node_may_go() {
    for why in [SILENT, Departure::Signal(15)] {
        let mut state = joined(settings(1, 2, 1), [guest(0), guest(1)]);
        let store = |round| Entry::Store { round, host: "host0".to_owned(), port: 1 };
        state.apply(store(0)).unwrap();
        left(&mut state, 0, why);
        assert!(state.running().unwrap().ending);
        ended(&mut state, 1, false);
        assert!(state.has_enough() && state.job_end().is_none());
        state.apply(Entry::LastCall { round: 1, nonce: 0 }).unwrap();
        // Its store has gone with it, and what it still says about one is of the round before.
        state.apply(store(0)).unwrap();
        let running = state.running().unwrap();
        assert_eq!(
            (running.node_rank(NodeId(1)), running.members.len(), &running.store),
            (Some(0), 1, &None)
        );
    }
}

#[test]
fn a_node_that_is_told_to_end_may_be_replaced_and_one_that_is_interrupted_ends_the_job() {
    let (term, interrupt) = (15, 2);
    let cases = [(term, 1, true), (term, 0, false), (interrupt, 1, false)];
    // Also if a worker has failed before.
    for ((signal, max_restarts, goes_on), fails) in
        cases.into_iter().flat_map(|case| [(case, false), (case, true)])
    {
        let mut state = joined(settings(2, 2, max_restarts), [node(0, 1, Some(0)), node(1, 1, Some(1))]);
        if fails {
            failed(&mut state, 0, 0, None);
        }
        left(&mut state, 1, Departure::Signal(signal));
        ended(&mut state, 0, false);
        assert_eq!((state.is_gathering(), state.job_end().is_none()), (goes_on, goes_on));
        if goes_on {
            state
                .apply(Entry::Join { node: node(2, 1, Some(1)), settings: settings(2, 2, max_restarts) })
                .unwrap();
            assert_eq!((state.running().unwrap().world_size(), state.restarts()), (2, 1));
        }
    }
}

#[test]
fn a_node_whose_launcher_has_ended_without_a_word_costs_a_restart_and_is_the_cause() {
    let mut state = joined(settings(2, 3, 1), [node(0, 1, None), node(1, 1, None), node(2, 1, None)]);
    // The workers of the others saw the end of its workers first.
    failed(&mut state, 0, 0, None);
    state.apply(MembershipState::absent(NodeId(1), NodeId(0), Absence::Ended)).unwrap();
    ended(&mut state, 0, false);
    ended(&mut state, 2, false);
    assert!(state.has_enough());
    assert_eq!(state.restarts(), 1);
    let cause = state.last_cause();
    assert!(
        matches!(cause, Some(Cause::Node { node_rank: Some(1), why: Departure::Ended, .. })),
        "{cause:?}"
    );
}

/// What a node of the simulation does next.
#[derive(Clone, Debug)]
enum Act {
    Read(u8),
    Fail,
    Finish(bool),
    /// It stops reading, and the others are told that it is silent.
    Freeze,
    Leave,
    LastCall,
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        8 => (1..6_u8).prop_map(Act::Read),
        2 => Just(Act::Fail),
        4 => any::<bool>().prop_map(Act::Finish),
        1 => Just(Act::Freeze),
        1 => Just(Act::Leave),
        2 => Just(Act::LastCall),
    ]
}

/// A node: what it has read, and the round whose workers it has.
struct Sim {
    id: NodeId,
    state: MembershipState,
    read: usize,
    workers_of: Option<u64>,
    done_with: Option<u64>,
    is_there: bool,
}

impl Sim {
    /// Reads, and starts its workers if a round that it has not had takes it in.
    fn read(&mut self, log: &[Entry], count: usize) {
        for entry in log.iter().skip(self.read).take(count) {
            let _ = self.state.apply(entry.clone());
            self.read += 1;
        }
        let round = self.state.round();
        let takes_part = |running: &Running| running.node_rank(self.id).is_some() && !running.ending;
        if self.workers_of.is_none()
            && self.done_with.is_none_or(|done| done < round)
            && self.state.running().is_some_and(takes_part)
        {
            self.workers_of = Some(round);
        }
    }

    fn end(&mut self, log: &mut Vec<Entry>, succeeded: bool) {
        if let Some(round) = self.workers_of.take() {
            self.done_with = Some(round);
            log.push(Entry::Ended { round, node: self.id, succeeded });
        } else if let Some(running) = self.state.running()
            && running.ending
            && running.node_rank(self.id).is_some()
            && self.done_with != Some(self.state.round())
        {
            self.done_with = Some(self.state.round());
            log.push(Entry::Ended { round: self.state.round(), node: self.id, succeeded: false });
        }
    }
}

/// The log's whole state: whoever reads it to the end.
fn all_of(log: &[Entry]) -> MembershipState {
    let mut state = MembershipState::default();
    for entry in log {
        let _ = state.apply(entry.clone());
    }
    state
}

/// The same for who begins with the state that has replaced the first entries.
fn from_state(log: &[Entry], replaced: usize) -> MembershipState {
    let compaction = MembershipState::COMPACTION.unwrap();
    let bytes = (compaction.encode)(&all_of(&log[..replaced])).unwrap();
    let mut state = (compaction.decode)(&bytes).unwrap();
    for entry in &log[replaced..] {
        let _ = state.apply(entry.clone());
    }
    state
}

/// Any entry, whether it makes sense or not.
fn entry() -> impl Strategy<Value = Entry> {
    let id = || (0..6_u64).prop_map(NodeId);
    let joining = (0..6_u64, 0..3_u32, proptest::option::of(0..4_u32), any::<bool>(), 1..3_u32);
    prop_oneof![
        6 => joining.prop_map(|(id, workers, node_rank, may_serve, max_restarts)| {
            let mut node = node(id, workers, node_rank);
            node.serves_store &= may_serve;
            Entry::Join { node, settings: settings(1, 3, max_restarts) }
        }),
        2 => (0..4_u64).prop_map(|round| Entry::LastCall { round, nonce: 0 }),
        1 => (0..4_u64).prop_map(|round| Entry::Store { round, host: "host".to_owned(), port: 1 }),
        2 => (0..4_u64, id(), 0..6_u32).prop_map(|(round, node, rank)| {
            Entry::Failed { round, node, failure: failure(rank, rank.checked_sub(1)) }
        }),
        6 => (0..4_u64, id(), any::<bool>())
            .prop_map(|(round, node, succeeded)| Entry::Ended { round, node, succeeded }),
        1 => (id(), any::<bool>()).prop_map(|(node, is_silent)| {
            Entry::Left { node, why: if is_silent { SILENT } else { Departure::GaveUp("full".to_owned()) } }
        }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn a_state_says_all_that_the_entries_before_it_say(
        log in proptest::collection::vec(entry(), 0..40),
    ) {
        let state = all_of(&log);
        for replaced in 0..=log.len() {
            prop_assert_eq!(&from_state(&log, replaced), &state);
        }
    }

    #[test]
    fn no_two_rounds_at_once_and_always_an_end(
        nodes in 1..5_u64,
        min in 1..5_u32,
        restarts in 0..3_u32,
        is_served in any::<bool>(),
        acts in proptest::collection::vec((0..5_usize, act()), 0..120),
    ) {
        let max = nodes as u32;
        let settings = settings(min.min(max), max, restarts);
        let mut log = Vec::new();
        let mut sims: Vec<Sim> = (0..nodes).map(|id| {
            let mut node = node(id, 1 + id as u32 % 2, None);
            node.serves_store &= is_served;
            log.push(Entry::Join { node, settings });
            let id = NodeId(id);
            Sim { id, state: MembershipState::default(), read: 0, workers_of: None, done_with: None, is_there: true }
        }).collect();
        for (who, act) in acts {
            let Some(sim) = sims.get_mut(who) else { continue };
            if !sim.is_there {
                continue;
            }
            match act {
                Act::Read(count) => sim.read(&log, count.into()),
                Act::Fail => if let Some(round) = sim.workers_of {
                    log.push(Entry::Failed { round, node: sim.id, failure: failure(who as u32, None) });
                    sim.end(&mut log, false);
                },
                Act::Finish(succeeded) => sim.end(&mut log, succeeded),
                Act::Freeze => {
                    sim.is_there = false;
                    log.push(Entry::Left { node: sim.id, why: SILENT });
                }
                Act::Leave => {
                    sim.is_there = false;
                    sim.workers_of = None;
                    log.push(Entry::Left { node: sim.id, why: Departure::Signal(15) });
                }
                Act::LastCall => log.push(Entry::LastCall { round: sim.state.round(), nonce: 0 }),
            }
            // Whatever each has read: the workers of those that are not given up belong to one round.
            let rounds: Vec<u64> = sims.iter().filter(|sim| sim.is_there).filter_map(|sim| sim.workers_of).collect();
            prop_assert!(rounds.windows(2).all(|pair| pair[0] == pair[1]), "{rounds:?}");
            let state = all_of(&log);
            if let Some(running) = state.running() {
                let ranks: Vec<u32> = running.members.iter().map(|member| member.first_rank).collect();
                prop_assert!(ranks.windows(2).all(|pair| pair[0] < pair[1]) && ranks.first() == Some(&0));
                prop_assert!(running.members.iter().filter(|member| member.node.serves_store).count() <= 1);
            }
            prop_assert!(state.restarts() <= restarts);
            // The remaining nodes go on, unless the lost node holds the log, or no restart is left.
            let is_lost = |cause: &Cause| matches!(cause, Cause::Node { why: Departure::Silent(_), .. });
            if let Some(JobEnd::Failed(cause)) = state.job_end() {
                prop_assert!(is_served || !is_lost(cause) || state.restarts() == restarts);
            }
        }
        // The living go on fairly; whoever waits for more nodes than there are gives up.
        for _ in 0..40 {
            for sim in sims.iter_mut().filter(|sim| sim.is_there) {
                sim.read(&log, usize::MAX);
                log.push(Entry::LastCall { round: sim.state.round(), nonce: 0 });
                let ending = sim.state.running().is_some_and(|running| running.ending);
                sim.end(&mut log, !ending);
            }
        }
        let state = all_of(&log);
        prop_assert_eq!(&from_state(&log, log.len() / 2), &state);
        let alive = sims.iter().filter(|sim| sim.is_there).count();
        prop_assert!(
            state.job_end().is_some() || (state.is_gathering() && alive < settings.min_nodes as usize) || alive == 0,
            "{state:?}"
        );
    }
}
