//! Which parameter lies where in which bucket. Pure: the same specs, order and limits give the same plan anywhere.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::ParameterSpec;
use crate::dtype::DType;
use crate::hash::fnv1a;
use crate::rank::Rank;
use crate::world_size::WorldSize;

/// Every parameter in exactly one bucket, buckets in the order in which they are launched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The buckets, in the order of their launch.
    pub buckets: Vec<BucketPlan>,
    /// Where each parameter lies.
    pub slices: Vec<BucketSlice>,
}

/// Parameters of one type that travel together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BucketPlan {
    /// The type of all its elements.
    pub dtype: DType,
    /// The elements of all its parameters together.
    pub elements: usize,
    /// In the order in which they lie in the bucket.
    pub parameters: Vec<usize>,
    /// How many elements are each rank's, if the bucket is sharded: its parameters then stand by owner.
    pub counts: Option<Arc<[usize]>>,
}

/// A parameter's elements within its bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BucketSlice {
    /// The bucket's index in the plan.
    pub bucket: usize,
    /// The first of the elements, counted from the beginning of the bucket.
    pub offset: usize,
    /// The number of elements.
    pub elements: usize,
}

/// When a bucket is closed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Limits {
    /// At a size, in bytes. A parameter larger than that has a bucket of its own.
    Bytes {
        /// For the first bucket of each type, which should be on its way early.
        first: usize,
        /// For all others of the type.
        others: usize,
    },
    /// Before a parameter that has another number than the one before it. There is one for each parameter.
    Numbers(Arc<[usize]>),
}

impl Limits {
    /// Whether `bucket`, the first of its type or a later one, has room for the parameter at `index`, of so many elements.
    fn has_room(&self, bucket: &BucketPlan, is_first: bool, index: usize, elements: usize) -> bool {
        let Some(&last) = bucket.parameters.last() else { return true };
        match self {
            Self::Bytes { first, others } => {
                let limit = if is_first { *first } else { *others };
                bucket.bytes() + elements * bucket.dtype.size() <= limit
            }
            Self::Numbers(numbers) => numbers[last] == numbers[index],
        }
    }
}

impl Plan {
    /// Fills buckets with the parameters in `order`, in which their gradients are expected.
    ///
    /// `order` names each of `parameters` once. A type whose elements come between those of another type closes no
    /// bucket; buckets are launched in the order in which their last gradient is expected.
    pub fn new(parameters: &[ParameterSpec], order: &[usize], limits: &Limits) -> Self {
        let mut open: BTreeMap<DType, Open> = BTreeMap::new();
        let mut filled: Vec<Open> = Vec::new();
        for (position, &index) in order.iter().enumerate() {
            let parameter = &parameters[index];
            let (dtype, elements) = (parameter.dtype, parameter.elements());
            let bucket = open.entry(dtype).or_insert_with(|| Open::new(dtype, true));
            if !limits.has_room(&bucket.plan, bucket.is_first, index, elements) {
                filled.push(std::mem::replace(bucket, Open::new(dtype, false)));
            }
            bucket.last = position;
            bucket.plan.elements += elements;
            bucket.plan.parameters.push(index);
        }
        filled.extend(open.into_values());
        filled.sort_by_key(|bucket| bucket.last);
        Self::of_buckets(filled.into_iter().map(|bucket| bucket.plan).collect(), parameters)
    }

    /// The same buckets, sharded among the ranks that own their parameters.
    pub fn sharded(mut self, parameters: &[ParameterSpec], owners: &[Rank], world: WorldSize) -> Self {
        for bucket in &mut self.buckets {
            bucket.parameters.sort_by_key(|&index| owners[index]);
            let mut counts = vec![0; world.count()];
            for &index in &bucket.parameters {
                counts[owners[index].index()] += parameters[index].elements();
            }
            bucket.counts = Some(counts.into());
        }
        Self::of_buckets(self.buckets, parameters)
    }

    fn of_buckets(buckets: Vec<BucketPlan>, parameters: &[ParameterSpec]) -> Self {
        let mut slices = vec![BucketSlice { bucket: 0, offset: 0, elements: 0 }; parameters.len()];
        for (bucket, plan) in buckets.iter().enumerate() {
            let mut offset = 0;
            for &index in &plan.parameters {
                let elements = parameters[index].elements();
                slices[index] = BucketSlice { bucket, offset, elements };
                offset += elements;
            }
        }
        Self { buckets, slices }
    }

    /// A number that differs, but for chance, between plans that differ.
    pub fn hash(&self) -> u64 {
        let words = self.buckets.iter().flat_map(|bucket| {
            let head = [bucket.dtype as usize, bucket.elements, bucket.parameters.len()];
            let parameters = bucket.parameters.iter().flat_map(|&index| [index, self.slices[index].offset]);
            head.into_iter()
                .chain(parameters)
                .chain(bucket.counts.iter().flat_map(|counts| counts.iter().copied()))
        });
        fnv1a(words.flat_map(|word| (word as u64).to_le_bytes()))
    }
}

impl BucketPlan {
    /// The bytes of the bucket.
    pub fn bytes(&self) -> usize {
        self.elements * self.dtype.size()
    }
}

impl BucketSlice {
    /// The parameter's bytes within its bucket.
    pub fn bytes(self, dtype: DType) -> std::ops::Range<usize> {
        let start = self.offset * dtype.size();
        start..start + self.elements * dtype.size()
    }
}

/// A bucket that is being filled.
struct Open {
    plan: BucketPlan,
    /// Whether it is the first of its type.
    is_first: bool,
    /// The position, in the order, of its last parameter.
    last: usize,
}

impl Open {
    fn new(dtype: DType, is_first: bool) -> Self {
        Self {
            plan: BucketPlan { dtype, elements: 0, parameters: Vec::new(), counts: None },
            is_first,
            last: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn spec(elements: usize, dtype: DType) -> ParameterSpec {
        ParameterSpec::new("p", [elements], dtype)
    }

    fn parameters() -> impl Strategy<Value = (Vec<ParameterSpec>, Vec<usize>)> {
        let dtype = prop::sample::select(vec![DType::F32, DType::F64, DType::F16]);
        prop::collection::vec((0usize..400, dtype), 1..40).prop_flat_map(|specs| {
            let parameters: Vec<_> =
                specs.into_iter().map(|(elements, dtype)| spec(elements, dtype)).collect();
            let order: Vec<usize> = (0..parameters.len()).collect();
            (Just(parameters), Just(order).prop_shuffle())
        })
    }

    proptest! {
        #[test]
        fn every_parameter_lies_in_one_bucket_of_its_type_and_limits_hold(
            (parameters, order) in parameters(), first in 1usize..1000, others in 1usize..3000,
        ) {
            let plan = Plan::new(&parameters, &order, &Limits::Bytes { first, others });
            let mut seen = vec![0; parameters.len()];
            let mut types = std::collections::BTreeSet::new();
            for (index, bucket) in plan.buckets.iter().enumerate() {
                let mut offset = 0;
                for &parameter in &bucket.parameters {
                    seen[parameter] += 1;
                    let elements = parameters[parameter].elements();
                    prop_assert_eq!(parameters[parameter].dtype, bucket.dtype);
                    prop_assert_eq!(plan.slices[parameter], BucketSlice { bucket: index, offset, elements });
                    offset += elements;
                }
                prop_assert_eq!(offset, bucket.elements);
                let limit = if types.insert(bucket.dtype) { first } else { others };
                prop_assert!(bucket.bytes() <= limit || bucket.parameters.len() == 1);
            }
            prop_assert!(seen.iter().all(|&count| count == 1));
        }

        #[test]
        fn buckets_follow_the_order_of_their_last_parameter((parameters, order) in parameters()) {
            let plan = Plan::new(&parameters, &order, &Limits::Bytes { first: 300, others: 900 });
            let position = |index: &usize| order.iter().position(|other| other == index).unwrap();
            let last: Vec<_> =
                plan.buckets.iter().map(|bucket| bucket.parameters.iter().map(position).max().unwrap()).collect();
            prop_assert!(last.is_sorted());
            for bucket in &plan.buckets {
                prop_assert!(bucket.parameters.iter().map(position).is_sorted());
            }
        }
    }

    proptest! {
        #[test]
        fn a_sharded_bucket_holds_the_same_parameters_each_rank_s_in_one_piece(
            (parameters, order) in parameters(), ranks in 1u32..5, seed in any::<u32>(),
        ) {
            let world = WorldSize::new(ranks).unwrap();
            let owner = |index: usize| Rank::new((index as u32).wrapping_mul(seed) % ranks);
            let owners: Vec<_> = (0..parameters.len()).map(owner).collect();
            let plain = Plan::new(&parameters, &order, &Limits::Bytes { first: 300, others: 900 });
            let sharded = plain.clone().sharded(&parameters, &owners, world);
            prop_assert_eq!(plain.buckets.len(), sharded.buckets.len());
            for (plain, bucket) in plain.buckets.iter().zip(&sharded.buckets) {
                let sorted = |bucket: &BucketPlan| {
                    let mut members = bucket.parameters.clone();
                    members.sort_unstable();
                    members
                };
                prop_assert_eq!(sorted(plain), sorted(bucket));
                let counts = bucket.counts.as_ref().unwrap();
                prop_assert_eq!(counts.iter().sum::<usize>(), bucket.elements);
                for &index in &bucket.parameters {
                    let (place, owner) = (sharded.slices[index], owners[index].index());
                    let start: usize = counts[..owner].iter().sum();
                    prop_assert!(place.offset >= start);
                    prop_assert!(place.offset + place.elements <= start + counts[owner]);
                }
            }
        }
    }

    #[test]
    fn the_first_bucket_is_small_and_the_hash_sees_each_change() {
        let parameters: Vec<_> = (0..8).map(|_| spec(256, DType::F32)).collect();
        let order: Vec<_> = (0..8).rev().collect();
        let limits = Limits::Bytes { first: 1024, others: 4096 };
        let plan = Plan::new(&parameters, &order, &limits);
        let members: Vec<_> = plan.buckets.iter().map(|bucket| bucket.parameters.clone()).collect();
        assert_eq!(members, [vec![7], vec![6, 5, 4, 3], vec![2, 1, 0]]);

        let hash = plan.hash();
        assert_eq!(hash, Plan::new(&parameters, &order, &limits).hash());
        assert_ne!(hash, Plan::new(&parameters, &order, &Limits::Bytes { first: 2048, others: 4096 }).hash());
        let forward: Vec<_> = (0..8).collect();
        assert_ne!(hash, Plan::new(&parameters, &forward, &limits).hash());
    }

    #[test]
    fn parameters_of_one_number_share_a_bucket_of_any_size() {
        let parameters: Vec<_> = (0..7).map(|_| spec(1 << 20, DType::F32)).collect();
        let order: Vec<_> = (0..7).rev().collect();
        let plan = Plan::new(&parameters, &order, &Limits::Numbers([4, 4, 4, 0, 9, 9, 4].into()));
        let members: Vec<_> = plan.buckets.iter().map(|bucket| bucket.parameters.clone()).collect();
        assert_eq!(members, [vec![6], vec![5, 4], vec![3], vec![2, 1, 0]]);
    }
}
