//! Simulates the plans of all ranks together, and checks every collective in this way.

use std::collections::{BTreeMap, VecDeque};

use proptest::prelude::*;

use super::*;

/// Rank r's contribution: a digit of its own in base 32, so that a result shows how often each rank entered it.
fn contribution(rank: Rank) -> u128 {
    1 << (5 * rank.get())
}

fn everybody(world: usize) -> u128 {
    (0..world as u32).map(|rank| contribution(Rank::new(rank))).sum()
}

/// The number of parts in a partial result.
fn held(partial: u128) -> u32 {
    (0..25).map(|rank| (partial >> (5 * rank) & 31) as u32).sum()
}

/// Added to an element when it is complete.
const DIVIDED: u128 = 1 << 100;

/// The result of all ranks of `world`. A world of one receives nothing, and divides nothing.
fn complete(world: WorldSize) -> u128 {
    everybody(world.count()) + if world == WorldSize::ONE { 0 } else { DIVIDED }
}

/// Runs all plans until each has ended; fails if they wait for each other, or if a message is left over. Returns the
/// number of elements that each rank sent.
fn play(plans: &[Plan], buffers: &mut [Vec<u128>]) -> Vec<usize> {
    let mut wire: BTreeMap<(usize, usize), VecDeque<Vec<u128>>> = BTreeMap::new();
    let mut place = vec![(0, false); plans.len()];
    let mut sent = vec![0; plans.len()];
    loop {
        let mut moved = false;
        for rank in 0..plans.len() {
            let (step, has_sent) = &mut place[rank];
            let Some(current) = plans[rank].get(*step) else { continue };
            if let (Some(Send { to, range }), false) = (&current.send, &has_sent) {
                assert_ne!(to.index(), rank);
                let payload = buffers[rank][range.clone()].to_vec();
                sent[rank] += payload.len();
                wire.entry((rank, to.index())).or_default().push_back(payload);
                moved = true;
            }
            *has_sent = true;
            if let Some(Recv { from, range, combine, parts }) = &current.recv {
                let waiting = wire.get_mut(&(from.index(), rank));
                let Some(payload) = waiting.and_then(VecDeque::pop_front) else { continue };
                assert_eq!(payload.len(), range.len(), "rank {rank} step {step}");
                for (local, received) in buffers[rank][range.clone()].iter_mut().zip(payload) {
                    if *combine == Combine::Replace {
                        *local = received;
                        continue;
                    }
                    // Only complete elements are divided, and only once: the mark is a digit of its own.
                    if *parts != Parts::default() {
                        assert_eq!((held(*local), held(received)), (parts.local, parts.received));
                    }
                    *local += received;
                    if parts.divisor().is_some() {
                        assert_eq!(*local, everybody(plans.len()));
                        *local += DIVIDED;
                    }
                }
            }
            (*step, *has_sent, moved) = (*step + 1, false, true);
        }
        if !moved {
            break;
        }
    }
    for (rank, plan) in plans.iter().enumerate() {
        assert_eq!(place[rank].0, plan.len(), "rank {rank} waits for ever");
    }
    assert!(wire.values().all(VecDeque::is_empty), "a message was left over");
    sent
}

/// As [`play`], with separate inputs, and outputs of `length`, which it returns.
fn play_apart(plans: &[Plan], inputs: &[Vec<u128>], length: impl Fn(usize) -> usize) -> Vec<Vec<u128>> {
    let mut behind = plans.to_vec();
    for (plan, input) in behind.iter_mut().zip(inputs) {
        for recv in plan.iter_mut().filter_map(|step| step.recv.as_mut()) {
            recv.range = recv.range.start + input.len()..recv.range.end + input.len();
        }
    }
    let mut buffers: Vec<Vec<u128>> = inputs.to_vec();
    for (rank, buffer) in buffers.iter_mut().enumerate() {
        buffer.resize(buffer.len() + length(rank), 0);
    }
    play(&behind, &mut buffers);
    buffers.into_iter().zip(inputs).map(|(buffer, input)| buffer[input.len()..].to_vec()).collect()
}

fn plans(world: WorldSize, plan: impl Fn(Rank) -> Plan) -> Vec<Plan> {
    world.ranks().map(plan).collect()
}

fn own(world: WorldSize, elements: usize) -> Vec<Vec<u128>> {
    world.ranks().map(|rank| vec![contribution(rank); elements]).collect()
}

fn worlds() -> impl Strategy<Value = WorldSize> {
    (1u32..=17).prop_map(|size| WorldSize::new(size).unwrap())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn chunks_cover_everything_once(world in worlds(), elements in 0usize..10_000) {
        let mut end = 0;
        for index in 0..world.count() {
            let range = chunk(elements, world, index);
            prop_assert_eq!(range.start, end);
            prop_assert!(range.len().abs_diff(elements / world.count()) <= 1);
            end = range.end;
        }
        prop_assert_eq!(end, elements);
    }

    #[test]
    fn all_reduce_takes_each_rank_once(world in worlds(), elements in 0usize..10_000) {
        for algorithm in [ring::all_reduce, doubling::all_reduce, halving::all_reduce] {
            let mut buffers = own(world, elements);
            let plans = plans(world, |rank| algorithm(rank, world, elements));
            play(&plans, &mut buffers);
            prop_assert!(buffers.iter().flatten().all(|value| *value == complete(world)));
        }
    }

    #[test]
    fn a_ring_sends_the_least_possible(world in worlds(), share in 0usize..500) {
        let elements = share * world.count();
        let sent = play(&plans(world, |rank| ring::all_reduce(rank, world, elements)), &mut own(world, elements));
        prop_assert!(sent.iter().all(|sent| *sent == 2 * share * (world.count() - 1)));
    }

    #[test]
    fn halving_sends_the_least_possible_in_worlds_of_a_power_of_two(exponent in 0u32..5, share in 0usize..500) {
        let world = WorldSize::new(1 << exponent).unwrap();
        let elements = share * world.count();
        let plans = plans(world, |rank| halving::all_reduce(rank, world, elements));
        prop_assert!(plans.iter().all(|plan| plan.len() == 2 * exponent as usize));
        let sent = play(&plans, &mut own(world, elements));
        prop_assert!(sent.iter().all(|sent| *sent == 2 * share * (world.count() - 1)));
    }

    #[test]
    fn reduce_leaves_the_root_everything(world in worlds(), root in 0u32..17, elements in 0usize..10_000) {
        let root = Rank::new(root % world.get());
        for algorithm in [tree::reduce, tree::reduce_ring] {
            let mut buffers = own(world, elements);
            play(&plans(world, |rank| algorithm(rank, world, root, elements)), &mut buffers);
            prop_assert!(buffers[root.index()].iter().all(|value| *value == complete(world)));
        }
    }

    #[test]
    fn a_gather_and_a_scatter_along_a_tree(world in worlds(), root in 0u32..17, share in 0usize..100) {
        let root = Rank::new(root % world.get());
        let place = |rank: Rank| before(rank, root.index(), world).index();
        let mut buffers = own(world, share * world.count());
        play(&plans(world, |rank| tree::gather(rank, world, root, share)), &mut buffers);
        for rank in world.ranks() {
            let part = &buffers[root.index()][place(rank) * share..(place(rank) + 1) * share];
            prop_assert!(part.iter().all(|value| *value == contribution(rank)));
        }
        // The root's gathered elements go back to the ranks that they came from.
        play(&plans(world, |rank| tree::scatter(rank, world, root, share)), &mut buffers);
        for rank in world.ranks() {
            let part = &buffers[rank.index()][place(rank) * share..(place(rank) + 1) * share];
            prop_assert!(part.iter().all(|value| *value == contribution(rank)));
        }
    }

    #[test]
    fn all_gather_v_brings_every_share_everywhere(counts in prop::collection::vec(0usize..300, 1..17)) {
        let world = WorldSize::new(counts.len() as u32).unwrap();
        let layout = Counts::new(&counts, world).unwrap();
        let mut buffers = own(world, layout.total());
        play(&plans(world, |rank| all_gather_v(rank, world, &layout)), &mut buffers);
        for buffer in &buffers {
            for origin in world.ranks() {
                prop_assert!(buffer[layout.of(origin.index())].iter().all(|value| *value == contribution(origin)));
            }
        }
    }

    #[test]
    fn an_all_gather_in_rounds_takes_the_fewest_steps_and_sends_each_share_as_often_as_a_ring(
        counts in prop::collection::vec(0usize..300, 1..25),
    ) {
        let world = WorldSize::new(counts.len() as u32).unwrap();
        let layout = Counts::new(&counts, world).unwrap();
        let last = world.count() - 1;
        let places = |rank: usize| layout.rotated((rank + 1) % world.count());
        let mut buffers: Vec<_> = world.ranks().map(|rank| {
            let mut buffer = vec![0; layout.total()];
            buffer[places(rank.index()).of(last)].fill(contribution(rank));
            buffer
        }).collect();
        let plans = plans(world, |rank| all_gather_in_rounds(rank, world, &layout));
        prop_assert!(plans.iter().all(|plan| plan.len() == world.get().next_power_of_two().ilog2() as usize));
        let sent = play(&plans, &mut buffers);
        prop_assert_eq!(sent.iter().sum::<usize>(), layout.total() * last);
        for (rank, buffer) in buffers.iter().enumerate() {
            let places = places(rank);
            for origin in world.ranks() {
                let place = (origin.index() + last - rank) % world.count();
                prop_assert_eq!(places.of(place).len(), counts[origin.index()]);
                prop_assert!(buffer[places.of(place)].iter().all(|value| *value == contribution(origin)));
            }
        }
    }

    #[test]
    fn reduce_scatter_v_leaves_each_rank_its_share_and_sends_the_rest_once(
        counts in prop::collection::vec(0usize..300, 1..17),
    ) {
        let world = WorldSize::new(counts.len() as u32).unwrap();
        let layout = Counts::new(&counts, world).unwrap();
        let mut buffers = own(world, layout.total());
        let sent = play(&plans(world, |rank| reduce_scatter_v(rank, world, &layout)), &mut buffers);
        for rank in world.ranks() {
            let part = &buffers[rank.index()][layout.of(rank.index())];
            prop_assert!(part.iter().all(|value| *value == complete(world)));
            prop_assert_eq!(sent[rank.index()], layout.total() - counts[rank.index()]);
        }
    }

    #[test]
    fn each_pair_exchanges_its_own_in_an_all_to_all(
        table in (1usize..10).prop_flat_map(|world| prop::collection::vec(prop::collection::vec(0usize..50, world), world)),
        eager in 0usize..50,
    ) {
        let world = WorldSize::new(table.len() as u32).unwrap();
        let sent: Vec<_> = table.iter().map(|counts| Counts::new(counts, world).unwrap()).collect();
        let received: Vec<_> = (0..table.len())
            .map(|rank| Counts::new(&table.iter().map(|row| row[rank]).collect::<Vec<_>>(), world).unwrap())
            .collect();
        // From a to b: a digit for each.
        let mark = |from: usize, to: usize| (from * 32 + to + 1) as u128;
        let inputs: Vec<Vec<u128>> = (0..table.len())
            .map(|from| (0..table.len()).flat_map(|to| vec![mark(from, to); table[from][to]]).collect())
            .collect();
        let plan = |rank: Rank| all_to_all(rank, world, &sent[rank.index()], &received[rank.index()], eager);
        let outputs = play_apart(&plans(world, plan), &inputs, |rank| received[rank].total());
        for to in 0..table.len() {
            for from in (0..table.len()).filter(|from| *from != to) {
                prop_assert!(outputs[to][received[to].of(from)].iter().all(|value| *value == mark(from, to)));
            }
        }
    }

    #[test]
    fn the_root_meets_everybody_in_a_gather_and_a_scatter(world in worlds(), root in 0u32..17, share in 0usize..100) {
        let root = Rank::new(root % world.get());
        let layout = Counts::even(share, world);
        let inputs = own(world, share);
        let whole = |rank: usize| if rank == root.index() { layout.total() } else { 0 };
        let gathered = play_apart(&plans(world, |rank| gather(rank, world, root, share)), &inputs, whole);
        let others = || world.ranks().filter(|rank| *rank != root);
        for rank in others() {
            let part = &gathered[root.index()][layout.of(rank.index())];
            prop_assert!(part.iter().all(|value| *value == contribution(rank)));
        }
        let scattered = play_apart(&plans(world, |rank| scatter(rank, world, root, share)), &gathered, |_| share);
        for rank in others() {
            prop_assert!(scattered[rank.index()].iter().all(|value| *value == contribution(rank)));
        }
    }

    #[test]
    fn reduce_scatter_leaves_each_rank_its_chunk(world in worlds(), elements in 0usize..10_000) {
        let mut buffers = own(world, elements);
        play(&plans(world, |rank| reduce_scatter(rank, world, elements)), &mut buffers);
        for rank in world.ranks() {
            let part = &buffers[rank.index()][chunk(elements, world, rank.index())];
            prop_assert!(part.iter().all(|value| *value == complete(world)));
        }
    }

    #[test]
    fn all_gather_brings_every_chunk_everywhere(world in worlds(), elements in 0usize..10_000) {
        let mut buffers = own(world, elements);
        play(&plans(world, |rank| ring::all_gather(rank, world, elements)), &mut buffers);
        for buffer in &buffers {
            for origin in world.ranks() {
                let part = &buffer[chunk(elements, world, origin.index())];
                prop_assert!(part.iter().all(|value| *value == contribution(origin)));
            }
        }
    }

    #[test]
    fn parts_of_all_ranks_reach_every_host_once(
        host_of in prop::collection::vec(0usize..4, 2..16),
        counts in prop::collection::vec(0usize..5, 16),
    ) {
        let mut hosts = vec![Vec::new(); 4];
        host_of.iter().enumerate().for_each(|(rank, host)| hosts[*host].push(Rank::new(rank as u32)));
        hosts.retain(|ranks| !ranks.is_empty());
        let world = WorldSize::new(host_of.len() as u32).unwrap();
        let counts = Counts::new(&counts[..world.count()], world).unwrap();
        let hierarchies: Option<Vec<_>> = world.ranks().map(|rank| Hierarchy::new(&hosts, rank)).collect();
        let Some(hierarchies) = hierarchies else { return Ok(()) };
        // Each rank has the parts of its host.
        let mut buffers = vec![vec![0; counts.total()]; world.count()];
        for ranks in &hosts {
            for (one, other) in ranks.iter().flat_map(|one| ranks.iter().map(move |other| (one, other))) {
                buffers[one.index()][counts.of(other.index())].fill(1);
            }
        }
        let plan = |hierarchy: &Hierarchy| {
            hierarchy.all_gather_v(&counts).map_or_else(Plan::new, |(leaders, plan)| leaders.translate(plan, 0))
        };
        let plans: Vec<Plan> = hierarchies.iter().map(plan).collect();
        let sent = play(&plans, &mut buffers);
        let of = |ranks: &[Rank]| ranks.iter().map(|rank| counts.of(rank.index()).len()).sum::<usize>();
        prop_assert_eq!(sent.iter().sum::<usize>(), counts.total() * (hosts.len() - 1));
        for (host, ranks) in hosts.iter().enumerate() {
            let hierarchy = &hierarchies[ranks[0].index()];
            // What a host's owners give to its other ranks is there, and it is all that the other hosts' ranks have.
            let mut given = 0;
            for other in hierarchy.hosts().ranks().filter(|other| other.index() != host) {
                for turn in 0..hierarchy.turns() {
                    for (stripe, owner) in ranks.iter().enumerate() {
                        let part = hierarchy.part(&counts, turn, other, stripe);
                        given += part.len();
                        prop_assert!(buffers[owner.index()][part].iter().all(|has| *has == 1));
                    }
                }
            }
            prop_assert_eq!(given, counts.total() - of(ranks));
        }
    }

    #[test]
    fn leaders_find_the_parts_of_every_host_where_they_unpack_them(
        host_of in prop::collection::vec(0usize..5, 2..16),
        counts in prop::collection::vec(0usize..5, 16),
    ) {
        let mut layout = vec![Vec::new(); 5];
        host_of.iter().enumerate().for_each(|(rank, host)| layout[*host].push(Rank::new(rank as u32)));
        layout.retain(|ranks| !ranks.is_empty());
        let world = WorldSize::new(host_of.len() as u32).unwrap();
        let counts = Counts::new(&counts[..world.count()], world).unwrap();
        let leaders: Option<Vec<_>> = layout.iter().map(|ranks| Hierarchy::new(&layout, ranks[0])).collect();
        let Some(leaders) = leaders else { return Ok(()) };
        let length = |rank: &Rank| counts.of(rank.index()).len();
        let of_host = |ranks: &Vec<Rank>| ranks.iter().map(length).sum::<usize>();
        // Each leader packs its own host's parts at the end.
        let packed = |ranks: &Vec<Rank>| -> Vec<u128> {
            let own = ranks.iter().flat_map(|rank| vec![contribution(*rank); length(rank)]);
            vec![0; counts.total() - of_host(ranks)].into_iter().chain(own).collect()
        };
        let mut buffers: Vec<Vec<u128>> = layout.iter().map(packed).collect();
        let plans: Vec<Plan> = leaders.iter().map(|leader| leader.all_gather_in_rounds(&counts)).collect();
        let sent = play(&plans, &mut buffers);
        prop_assert_eq!(sent.iter().sum::<usize>(), counts.total() * (layout.len() - 1));
        for (host, leader) in leaders.iter().enumerate() {
            let mut whole = vec![0; counts.total()];
            let mut packed = buffers[host].iter();
            let parts = leader.parts_from(&counts, Rank::new(host as u32));
            for part in parts.skip(layout[host].len()) {
                whole[part].iter_mut().zip(packed.by_ref()).for_each(|(place, value)| *place = *value);
            }
            for rank in layout.iter().enumerate().filter(|(other, _)| *other != host).flat_map(|(_, ranks)| ranks) {
                prop_assert!(whole[counts.of(rank.index())].iter().all(|value| *value == contribution(*rank)));
            }
        }
    }

    #[test]
    fn sums_of_hosts_go_to_the_owners_of_the_parts_that_they_are_for_wherever_those_are(
        (ranks_of, order, counts) in (1usize..4, 2usize..5)
            .prop_flat_map(|(least, hosts)| prop::collection::vec(least..=2 * least, hosts))
            .prop_flat_map(|ranks_of| {
                let order: Vec<Rank> = (0..ranks_of.iter().sum::<usize>() as u32).map(Rank::new).collect();
                let counts = prop::collection::vec(0usize..5, order.len());
                (Just(ranks_of), Just(order).prop_shuffle(), counts)
            }),
    ) {
        let mut rest = order.iter().copied();
        let layout: Vec<Vec<Rank>> = ranks_of.iter().map(|ranks| rest.by_ref().take(*ranks).collect()).collect();
        let counts = Counts::new(&counts, WorldSize::new(order.len() as u32).unwrap()).unwrap();
        let hosts = WorldSize::new(layout.len() as u32).unwrap();
        let Some(first) = Hierarchy::new(&layout, order[0]) else { return Ok(()) };
        prop_assert!(first.scatters_in_few_rounds());
        let mut given = 0;
        for stripe in 0..first.most_stripes() {
            let plan = |ranks: &Vec<Rank>| {
                let hierarchy = Hierarchy::new(&layout, ranks[stripe]).unwrap();
                hierarchy.reduce_scatter_v(&counts).unwrap().1
            };
            // A host's sums count as one contribution.
            let mut buffers = own(hosts, counts.total());
            let sent = play(&layout.iter().map(plan).collect::<Vec<_>>(), &mut buffers);
            let part = |host: usize, turn: usize| first.part(&counts, turn, Rank::new(host as u32), stripe);
            let of = |host: usize| (0..first.turns()).map(|turn| part(host, turn).len()).sum::<usize>();
            let all = (0..layout.len()).map(of).sum::<usize>();
            for (host, buffer) in buffers.iter().enumerate() {
                for turn in 0..first.turns() {
                    prop_assert!(buffer[part(host, turn)].iter().all(|value| *value == complete(hosts)));
                }
                prop_assert_eq!(sent[host], all - of(host));
            }
            given += all;
        }
        // The owners have the parts of all ranks.
        prop_assert_eq!(given, counts.total());
        // Where a host has more than twice as many ranks as another, an all-reduce has fewer rounds.
        let world = order.len() as u32;
        let more = vec![(0..=2 * world).map(|rank| Rank::new(world + rank)).collect()];
        let wide = Hierarchy::new(&[layout, more].concat(), order[0]).unwrap();
        prop_assert!(!wide.scatters_in_few_rounds());
    }

    #[test]
    fn broadcast_reaches_everybody(world in worlds(), root in 0u32..17, elements in 0usize..10_000) {
        let root = Rank::new(root % world.get());
        for algorithm in [tree::binomial, tree::scatter_ring] {
            let mut buffers = own(world, elements);
            play(&plans(world, |rank| algorithm(rank, world, root, elements)), &mut buffers);
            prop_assert!(buffers.iter().flatten().all(|value| *value == contribution(root)));
        }
    }

    #[test]
    fn nobody_leaves_a_barrier_before_all_have_come(world in worlds()) {
        // Give each frame one element: the ranks whose frames have reached this one, directly or through others.
        let with_news = |rank| dissemination(rank, world).into_iter().map(|step| {
            let (send, recv) = step.send.zip(step.recv).unwrap();
            Step::send(send.to, 0..1).and_recv(recv.from, 0..1, Combine::Append)
        }).collect();
        let mut heard = own(world, 1);
        play(&plans(world, with_news), &mut heard);
        for buffer in &heard {
            for rank in world.ranks() {
                prop_assert!(buffer[0] >> (5 * rank.get()) & 31 >= 1, "rank {} was not waited for", rank);
            }
        }
    }
}
