//! Floating-point results depend on the order of the operands. Each algorithm combines in the order that
//! docs/algorithms.md ("The same bits everywhere") gives: here is that order again, written down for one element at a time.

use std::convert::identity;
use std::fmt::Debug;

use half::{bf16, f16};
use phalanx::testing::{Fabric, run};
use phalanx::{Buffer, DType, Element, ProcessGroup, Rank, ReduceOp, Tuning, TuningRow};

/// An element, and how it is combined with another one.
trait Number: Element + Copy + Debug {
    /// What it is combined in: f32 for the halves, else itself.
    type Wide: Copy;
    /// A value of no particular roundness. Floats differ in magnitude and sign, so that another order gives other bits.
    fn of(random: u64) -> Self;
    fn widen(self) -> Self::Wide;
    fn narrow(wide: Self::Wide) -> Self;
    fn combine(op: ReduceOp, left: Self::Wide, right: Self::Wide) -> Self::Wide;
    fn divide(wide: Self::Wide, by: u32) -> Self::Wide;
    fn bits(self) -> u64;
}

/// Between 1/64 and 128, of either sign.
fn float(random: u64) -> f64 {
    let magnitude = (1.0 + (random >> 12) as f64 / (1u64 << 52) as f64) * 2f64.powi((random % 13) as i32 - 6);
    if random & 0x800 == 0 { magnitude } else { -magnitude }
}

macro_rules! integers {
    ($($type:ty),*) => {$(impl Number for $type {
        type Wide = Self;
        fn of(random: u64) -> Self { (random >> 7) as Self }
        fn widen(self) -> Self { self }
        fn narrow(wide: Self) -> Self { wide }
        fn combine(op: ReduceOp, left: Self, right: Self) -> Self {
            match op {
                ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PreMulSum(_) => left.wrapping_add(right),
                ReduceOp::Product => left.wrapping_mul(right),
                ReduceOp::Min => left.min(right),
                ReduceOp::Max => left.max(right),
                ReduceOp::BAnd => left & right,
                ReduceOp::BOr => left | right,
                ReduceOp::BXor => left ^ right,
            }
        }
        fn divide(_: Self, _: u32) -> Self { unreachable!("only floats have an average") }
        fn bits(self) -> u64 { self as u64 }
    })*};
}
integers!(i32, i64, u8, i8);

macro_rules! floats {
    ($($type:ty, $wide:ty, $of:path, $widen:path, $narrow:path;)*) => {$(impl Number for $type {
        type Wide = $wide;
        fn of(random: u64) -> Self { $of(float(random)) }
        fn widen(self) -> $wide { $widen(self) }
        fn narrow(wide: $wide) -> Self { $narrow(wide) }
        fn combine(op: ReduceOp, left: $wide, right: $wide) -> $wide {
            match op {
                ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PreMulSum(_) => left + right,
                ReduceOp::Product => left * right,
                ReduceOp::Min => left.min(right),
                ReduceOp::Max => left.max(right),
                ReduceOp::BAnd | ReduceOp::BOr | ReduceOp::BXor => unreachable!("{op} is not for floats"),
            }
        }
        fn divide(wide: $wide, by: u32) -> $wide { wide / by as $wide }
        fn bits(self) -> u64 { self.to_bits().into() }
    })*};
}
floats!(
    f32, f32, single, identity, identity;
    f64, f64, identity, identity, identity;
    f16, f32, f16::from_f64, f16::to_f32, f16::from_f32;
    bf16, f32, bf16::from_f64, bf16::to_f32, bf16::from_f32;
);

fn single(value: f64) -> f32 {
    value as f32
}

/// What `rank` brings at `index`.
fn value<T: Number>(rank: usize, index: usize) -> T {
    let mut random = ((rank as u64 + 1) << 40) ^ index as u64;
    // SplitMix64's last steps.
    random = (random ^ (random >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    random = (random ^ (random >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    T::of(random ^ (random >> 31))
}

fn input<T: Number>(rank: usize, length: usize) -> Vec<T> {
    (0..length).map(|index| value(rank, index)).collect()
}

/// In which order the elements of all ranks are combined.
#[derive(Clone, Copy, Debug)]
enum Order {
    /// Shared memory: ((r0 + r1) + r2) + .., rounded once.
    Ranks,
    /// A ring: from this rank on, once round, rounded after each.
    Ring(usize),
    /// Recursive doubling and halving: neighbours first, then neighbouring pairs, and so on.
    Tree,
    /// A binomial tree: as `Tree`, but from this rank on, once round; and if the world is no power of two, the last ones wait.
    Binomial(usize),
    /// Two hosts that share memory: each in the order of its ranks, then both.
    Hosts,
}

/// How many ranks' elements a part holds, and what they come to.
type Part<T> = (usize, T);

/// One step of a plan, rounded after it.
fn step<T: Number>(op: ReduceOp, world: usize, left: Part<T>, right: Part<T>) -> Part<T> {
    let count = left.0 + right.0;
    if op == ReduceOp::Avg && T::DTYPE == DType::F16 {
        return (count, scaled_step(world, left, right));
    }
    let both = T::combine(op, left.1.widen(), right.1.widen());
    let is_average = op == ReduceOp::Avg && count == world;
    (count, T::narrow(if is_average { T::divide(both, world as u32) } else { both }))
}

/// A sum of f16 that becomes an average stands divided by the power of two that is the count or next above it.
fn scaled_step<T: Number>(world: usize, left: Part<T>, right: Part<T>) -> T {
    let half = |part: Part<T>| f16::from_bits(part.1.bits() as u16).to_f32();
    let scale = |count: usize| count.next_power_of_two() as f32;
    let both = half(left) * scale(left.0) + half(right) * scale(right.0);
    let count = left.0 + right.0;
    let result = f16::from_f32(if count == world { both / world as f32 } else { both / scale(count) });
    same_number(result)
}

/// The same number as a `T`, which is f16.
fn same_number<T: Number>(number: f16) -> T {
    *Buffer::from_slice(&[number]).as_slice::<T>().unwrap().first().unwrap()
}

/// What a host's ranks come to, rounded once, and divided at once if it is to be an average.
fn host<T: Number>(op: ReduceOp, divide_by: Option<usize>, values: &[T]) -> T {
    let sum = values.iter().map(|value| value.widen()).reduce(|left, right| T::combine(op, left, right));
    let sum = sum.unwrap();
    T::narrow(divide_by.map_or(sum, |by| T::divide(sum, by as u32)))
}

fn reference<T: Number>(op: ReduceOp, order: Order, values: &[T]) -> T {
    let world = values.len();
    let average = (op == ReduceOp::Avg).then_some(world);
    let join = |left: Part<T>, right: Part<T>| step(op, world, left, right);
    let parts = values.iter().map(|value| (1, *value));
    match order {
        Order::Ranks => host(op, average, values),
        Order::Ring(first) => parts.cycle().skip(first).take(world).reduce(join).unwrap().1,
        Order::Tree => {
            let folded = world - (1 << world.ilog2());
            let (pairs, rest) = values.split_at(2 * folded);
            let pairs = pairs.chunks(2).map(|pair| join((1, pair[0]), (1, pair[1])));
            let mut parts: Vec<Part<T>> = pairs.chain(rest.iter().map(|value| (1, *value))).collect();
            while parts.len() > 1 {
                parts = parts.chunks(2).map(|pair| join(pair[0], pair[1])).collect();
            }
            parts[0].1
        }
        Order::Binomial(root) => {
            let mut parts: Vec<Part<T>> = parts.cycle().skip(root).take(world).collect();
            while parts.len() > 1 {
                let pairs = parts.chunks(2);
                parts = pairs.map(|pair| pair.iter().copied().reduce(join).unwrap()).collect();
            }
            parts[0].1
        }
        Order::Hosts => {
            let (lower, upper) = values.split_at(world.div_ceil(2));
            let [lower, upper] = [lower, upper].map(|values| host(op, average, values).widen());
            T::narrow(T::combine(op, lower, upper))
        }
    }
}

/// The order in which an `all_reduce` of so many elements combines each.
fn order<T: Number>(fabric: Fabric, world: usize, length: usize) -> impl Fn(usize) -> Order {
    let row = tuning(world);
    let is_small = length * size_of::<T>() <= row.doubling_max.max(row.halving_max);
    let chunk = chunk(world, length);
    move |index| match fabric {
        Fabric::SharedMemory => Order::Ranks,
        // Two hosts of one rank each are two ranks.
        Fabric::TwoHosts if world > 2 => Order::Hosts,
        Fabric::InProcess | Fabric::Tcp | Fabric::TwoHosts if is_small => Order::Tree,
        Fabric::InProcess | Fabric::Tcp | Fabric::TwoHosts => Order::Ring(chunk(index)),
    }
}

/// The order in which a `reduce` of so many elements to `root` combines each.
fn order_to<T: Number>(fabric: Fabric, world: usize, length: usize, root: usize) -> impl Fn(usize) -> Order {
    let is_small = length * size_of::<T>() < tuning(world).reduce_ring_min;
    let chunk = chunk(world, length);
    move |index| match fabric {
        Fabric::SharedMemory => Order::Ranks,
        Fabric::TwoHosts if world > 2 => Order::Hosts,
        Fabric::InProcess | Fabric::Tcp | Fabric::TwoHosts if is_small => Order::Binomial(root),
        // As in a `reduce_scatter`: it begins behind the chunk's owner, and ends on it.
        Fabric::InProcess | Fabric::Tcp | Fabric::TwoHosts => Order::Ring(chunk(index) + 1),
    }
}

/// What algorithms are chosen by.
fn tuning(world: usize) -> TuningRow {
    Tuning::default().rows.into_iter().find(|row| row.world_max as usize >= world).unwrap()
}

/// In which of the `world` chunks of so many elements each is.
fn chunk(world: usize, length: usize) -> impl Fn(usize) -> usize {
    // The first chunks have an element more where it does not divide.
    let (share, longer) = (length / world, length % world);
    let within = longer * (share + 1);
    move |index| match index < within {
        true => index / (share + 1),
        false => longer + (index - within) / share,
    }
}

fn references<T: Number>(op: ReduceOp, order: impl Fn(usize) -> Order, inputs: &[Vec<T>]) -> Vec<T> {
    let length = inputs[0].len();
    let mut values = Vec::with_capacity(inputs.len());
    let element = |index| {
        values.clear();
        values.extend(inputs.iter().map(|input| input[index]));
        reference(op, order(index), &values)
    };
    (0..length).map(element).collect()
}

fn assert_same<T: Number>(data: &[T], expected: &[T], what: &str) {
    assert_eq!(data.len(), expected.len(), "{what}");
    let differs = data.iter().zip(expected).position(|(one, other)| one.bits() != other.bits());
    let both = differs.map(|index| (index, data[index], expected[index]));
    assert!(both.is_none(), "{what}: the index, what is there and what is expected: {both:?}");
}

/// Every rank has the reference's bits, in ordinary memory and in the group's.
fn all_reduces<T: Number>(world: u32, length: usize, ops: &[ReduceOp]) {
    let inputs: Vec<Vec<T>> = (0..world as usize).map(|rank| input(rank, length)).collect();
    let ops: Vec<ReduceOp> = ops.iter().copied().filter(|op| op.supports(T::DTYPE)).collect();
    let mut expected = Vec::new();
    for fabric in [Fabric::InProcess, Fabric::Tcp, Fabric::SharedMemory, Fabric::TwoHosts] {
        // Messages are the same plans, whatever carries them.
        if fabric != Fabric::Tcp {
            let references =
                |op: &ReduceOp| references(*op, order::<T>(fabric, world as usize, length), &inputs);
            expected = ops.iter().map(references).collect();
        }
        run(world, fabric, |group| {
            for (op, expected) in ops.iter().zip(&expected) {
                let own = &inputs[group.rank().index()];
                let what = format!("{op} of {length} x {} in {world} over {fabric:?}", T::DTYPE);
                let mut data = own.clone();
                group.all_reduce(&mut data, *op).unwrap();
                assert_same(&data, expected, &what);
                let mut memory = group.alloc(T::DTYPE, length).unwrap();
                memory.as_mut_slice::<T>().unwrap().copy_from_slice(own);
                group.all_reduce(memory.as_mut_slice::<T>().unwrap(), *op).unwrap();
                assert_same(memory.as_slice::<T>().unwrap(), expected, &what);
            }
        });
    }
}

fn of_every_type(world: u32, length: usize, ops: &[ReduceOp]) {
    all_reduces::<f32>(world, length, ops);
    all_reduces::<f64>(world, length, ops);
    all_reduces::<f16>(world, length, ops);
    all_reduces::<bf16>(world, length, ops);
    all_reduces::<i32>(world, length, ops);
    all_reduces::<i64>(world, length, ops);
    all_reduces::<u8>(world, length, ops);
    all_reduces::<i8>(world, length, ops);
}

#[test]
fn each_algorithm_combines_in_its_order() {
    for world in [2, 3, 5, 8] {
        // Doubling, halving and a ring, whichever the type.
        for length in [1, 1000, 12_345, 131_073] {
            of_every_type(world, length, &[ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Product]);
        }
    }
}

/// The root has the reference's bits, whichever rank that is, in ordinary memory and in the group's.
fn reduces<T: Number>(world: u32, length: usize, roots: &[u32]) {
    let inputs: Vec<Vec<T>> = (0..world as usize).map(|rank| input(rank, length)).collect();
    let ops: Vec<ReduceOp> = [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Product]
        .into_iter()
        .filter(|op| op.supports(T::DTYPE))
        .collect();
    for fabric in Fabric::ALL {
        run(world, fabric, |group| {
            for (op, &root) in ops.iter().flat_map(|op| roots.iter().map(move |root| (op, root))) {
                let own = &inputs[group.rank().index()];
                let mut data = own.clone();
                group.reduce(&mut data, Rank::new(root), *op).unwrap();
                let mut memory = group.alloc(T::DTYPE, length).unwrap();
                memory.as_mut_slice::<T>().unwrap().copy_from_slice(own);
                group.reduce(memory.as_mut_slice::<T>().unwrap(), Rank::new(root), *op).unwrap();
                if group.rank() == Rank::new(root) {
                    let order = order_to::<T>(fabric, world as usize, length, root as usize);
                    let expected = references(*op, order, &inputs);
                    let what =
                        format!("{op} of {length} x {} in {world} to {root} over {fabric:?}", T::DTYPE);
                    assert_same(&data, &expected, &what);
                    assert_same(memory.as_slice::<T>().unwrap(), &expected, &what);
                }
            }
        });
    }
}

#[test]
fn a_reduce_to_any_root_combines_in_its_order() {
    for (world, roots) in [(2, &[0, 1][..]), (3, &[0, 1, 2]), (5, &[1, 4]), (8, &[3])] {
        for length in [1, 1000, 20_000] {
            reduces::<f32>(world, length, roots);
            reduces::<f64>(world, length, roots);
            reduces::<f16>(world, length, roots);
            reduces::<bf16>(world, length, roots);
        }
        reduces::<i32>(world, 1000, roots);
    }
    // A ring.
    reduces::<f64>(3, 300_000, &[0, 1, 2]);
    reduces::<f64>(5, 300_001, &[3]);
    reduces::<bf16>(3, 1_100_000, &[2]);
}

#[test]
fn a_mebi_of_elements_of_every_type() {
    of_every_type(3, 1 << 20, &ReduceOp::ALL);
    of_every_type(4, 1 << 20, &[ReduceOp::Sum]);
}

#[test]
fn a_share_of_a_reduce_scatter_is_combined_on_its_way_to_its_owner_or_as_in_an_all_reduce() {
    fn shares<T: Number>(fabric: Fabric, group: &ProcessGroup) {
        let (rank, world) = (group.rank().index(), group.world_size().count());
        for op in [ReduceOp::Sum, ReduceOp::Avg].into_iter().filter(|op| op.supports(T::DTYPE)) {
            for length in [1, 1000, 40_000] {
                let inputs: Vec<Vec<T>> = (0..world).map(|rank| input(rank, length * world)).collect();
                let mut share = vec![value::<T>(rank, 0); length];
                group.reduce_scatter(&inputs[rank], &mut share, op).unwrap();
                // Few bytes of many ranks go as those of an `all_reduce` do.
                let TuningRow { doubling_max, halving_max, .. } = tuning(world);
                let most = if world > 7 { doubling_max.max(halving_max) } else { doubling_max };
                let is_small = world > 3 && length * world * size_of::<T>() <= most;
                let whole = order::<T>(fabric, world, length * world);
                let order = |index| match fabric {
                    Fabric::SharedMemory => Order::Ranks,
                    Fabric::InProcess | Fabric::Tcp | Fabric::TwoHosts if is_small => whole(index),
                    Fabric::TwoHosts if world > 2 => Order::Hosts,
                    Fabric::InProcess | Fabric::Tcp | Fabric::TwoHosts => Order::Ring(rank + 1),
                };
                let element = |index| {
                    let index = rank * length + index;
                    let values: Vec<T> = inputs.iter().map(|input| input[index]).collect();
                    reference(op, order(index), &values)
                };
                let expected: Vec<T> = (0..length).map(element).collect();
                let what = format!("{op} of {length} x {} in {world} over {fabric:?}", T::DTYPE);
                assert_same(&share, &expected, &what);
            }
        }
    }
    for fabric in Fabric::ALL {
        for world in [2, 3, 4, 5, 8] {
            run(world, fabric, |group| {
                shares::<f32>(fabric, &group);
                shares::<f64>(fabric, &group);
                shares::<f16>(fabric, &group);
                shares::<bf16>(fabric, &group);
                shares::<i32>(fabric, &group);
                shares::<u8>(fabric, &group);
            });
        }
    }
}

#[test]
fn averages_that_do_not_divide_are_rounded() {
    for fabric in Fabric::ALL {
        run(3, fabric, |group| {
            let rank = group.rank().index();
            let mut floats = [[1f32, 0.1, -1.0], [1.0, 0.1, -1.0], [2.0, 0.1, -3.0]][rank];
            group.all_reduce(&mut floats, ReduceOp::Avg).unwrap();
            let average = |a: f32, b: f32, c: f32| match fabric {
                // The first host has two ranks, and divides for itself.
                Fabric::TwoHosts => (a + b) / 3.0 + c / 3.0,
                Fabric::InProcess | Fabric::Tcp | Fabric::SharedMemory => (a + b + c) / 3.0,
            };
            let expected = [average(1.0, 1.0, 2.0), average(0.1, 0.1, 0.1), average(-1.0, -1.0, -3.0)];
            assert_eq!(floats.map(f32::to_bits), expected.map(f32::to_bits), "{fabric:?}");
            let mut halves = [bf16::from_f32([1.0, 1.0, 2.0][rank])];
            group.all_reduce(&mut halves, ReduceOp::Avg).unwrap();
            assert_eq!(halves, [bf16::from_f32(4.0 / 3.0)]);
        });
    }
}

/// Else the tests above would let any order pass.
#[test]
fn the_values_tell_orders_apart() {
    fn tells<T: Number>() {
        let values = |index| -> Vec<T> { (0..7).map(|rank| value(rank, index)).collect() };
        let result = |order, index| reference(ReduceOp::Sum, order, &values(index)).bits();
        let orders = [
            Order::Ring(0),
            Order::Ring(1),
            Order::Ring(2),
            Order::Tree,
            Order::Binomial(1),
            Order::Binomial(2),
            Order::Hosts,
        ];
        for (place, one) in orders.iter().enumerate() {
            for other in &orders[..place] {
                let differ = (0..1000).filter(|index| result(*one, *index) != result(*other, *index)).count();
                assert!(differ > 50, "{one:?} and {other:?} differ in {differ} of 1000 sums of {}", T::DTYPE);
            }
        }
    }
    tells::<f32>();
    tells::<f64>();
    tells::<f16>();
    tells::<bf16>();
}
