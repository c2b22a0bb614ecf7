//! The countdown of one backward pass, pure: gradients come in, launches in plan order come out.

use std::ops::Range;

use super::plan::Plan;

/// Which gradients of the current backward pass are there, and which buckets have been launched.
#[derive(Clone, Debug)]
pub(crate) struct ReducerState {
    /// Gradients still missing, for each bucket.
    missing: Vec<usize>,
    seen: Vec<bool>,
    /// Parameters in the order in which their gradients came.
    order: Vec<usize>,
    /// The first bucket that has not been launched.
    next: usize,
}

/// What follows from a gradient.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Advance {
    /// The bucket that this gradient filled.
    pub(crate) filled: Option<usize>,
    /// The buckets to launch now, in this order.
    pub(crate) launch: Range<usize>,
}

impl ReducerState {
    /// Before the first gradient.
    pub(crate) fn new(plan: &Plan) -> Self {
        Self {
            missing: plan.buckets.iter().map(|bucket| bucket.parameters.len()).collect(),
            seen: vec![false; plan.places.len()],
            order: Vec::with_capacity(plan.places.len()),
            next: 0,
        }
    }

    /// The same state as [`new`](Self::new), in the memory that is there.
    pub(crate) fn reset(&mut self, plan: &Plan) {
        self.missing.clear();
        self.missing.extend(plan.buckets.iter().map(|bucket| bucket.parameters.len()));
        self.seen.fill(false);
        self.order.clear();
        self.next = 0;
    }

    /// Notes the gradient of `parameter`; `None` if it was there already.
    ///
    /// A bucket is launched only after all buckets before it in the plan, so that every rank launches in the same
    /// order whatever the order of its gradients.
    pub(crate) fn ready(&mut self, plan: &Plan, parameter: usize) -> Option<Advance> {
        if std::mem::replace(&mut self.seen[parameter], true) {
            return None;
        }
        self.order.push(parameter);
        let bucket = plan.places[parameter].bucket;
        self.missing[bucket] -= 1;
        let filled = (self.missing[bucket] == 0).then_some(bucket);
        let first = self.next;
        if filled == Some(first) {
            self.next += self.missing[first..].iter().take_while(|&&missing| missing == 0).count();
        }
        Some(Advance { filled, launch: first..self.next })
    }

    /// Is the gradient of `parameter` there?
    pub(crate) fn has_seen(&self, parameter: usize) -> bool {
        self.seen[parameter]
    }

    /// Parameters without a gradient.
    pub(crate) fn unused(&self) -> Vec<usize> {
        (0..self.seen.len()).filter(|&parameter| !self.seen[parameter]).collect()
    }

    /// Parameters in the order in which their gradients came.
    pub(crate) fn order(&self) -> &[usize] {
        &self.order
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::ParameterSpec;
    use super::super::plan::Limits;
    use super::*;
    use crate::dtype::DType;

    proptest! {
        #[test]
        fn launches_come_in_plan_order_whatever_the_order_of_gradients(
            sizes in prop::collection::vec((1usize..50, any::<bool>()), 1..30),
            seed in any::<prop::sample::Selector>(),
            unused in 0usize..3,
        ) {
            let parameters: Vec<_> = sizes
                .iter()
                .map(|&(size, wide)| ParameterSpec::new("p", [size], if wide { DType::F64 } else { DType::F32 }))
                .collect();
            let reverse: Vec<_> = (0..parameters.len()).rev().collect();
            let plan = Plan::new(&parameters, &reverse, Limits { first: 100, others: 300 });
            let mut state = ReducerState::new(&plan);
            let mut left = reverse.clone();
            let mut launched = Vec::new();
            while left.len() > unused {
                let parameter = *seed.select(&left);
                left.retain(|&other| other != parameter);
                let advance = state.ready(&plan, parameter).unwrap();
                prop_assert_eq!(state.ready(&plan, parameter), None);
                for bucket in advance.launch {
                    prop_assert!(plan.buckets[bucket].parameters.iter().all(|&member| state.has_seen(member)));
                    launched.push(bucket);
                }
            }
            left.sort_unstable();
            prop_assert_eq!(state.unused(), left.clone());
            let complete = plan
                .buckets
                .iter()
                .take_while(|bucket| bucket.parameters.iter().all(|member| !left.contains(member)))
                .count();
            prop_assert_eq!(launched, (0..complete).collect::<Vec<_>>());
            state.reset(&plan);
            prop_assert_eq!(state.unused().len(), parameters.len());
        }
    }
}
