//! Parameters that stand in stages of two ranks.
//!
//! In one process they are one parameter, which gets both gradients. Here each rank would train its copy by the gradient of its own
//! stages, and the copies would drift apart. A rank sees only its own stages, so the ranks compare ids, which copies have in common: those
//! of one record, or of one `Param` that was cloned. Copies that were made each by itself have ids of their own, and look like any two
//! parameters.

use std::collections::HashMap;

use phalanx::{Caller, Error, Result};

use super::Pipeline;
use crate::parameters::Parameter;

/// An error on every rank if one of the `parameters` that this rank trains is on another rank too. All ranks call it together.
pub(super) fn check<const D: usize>(pipeline: &Pipeline<D>, parameters: &[Parameter]) -> Result<()> {
    if pipeline.plan.ranks() == 1 {
        return Ok(());
    }
    let group = pipeline.group.in_call(Caller::PipelineTrain);
    let own: Vec<u64> = parameters.iter().map(|parameter| parameter.id.val()).collect();
    let Some((id, ranks)) = on_two_ranks(&group.all_gather_object(&own)?) else { return Ok(()) };
    let own = parameters.iter().find(|parameter| parameter.id.val() == id);
    let place = own.map_or(String::new(), |parameter| match pipeline.stage_path(&parameter.name) {
        Some((stage, path)) => format!("`{path}` of stage {stage}"),
        None => format!("`{}`", parameter.name),
    });
    let places = group.all_gather_object(&place)?;
    let place = |rank: usize| places.get(rank).map_or("", String::as_str);
    Err(Error::invalid_argument(format!(
        "one parameter stands at {}, on rank {}, and at {}, on rank {}: both have the same ParamId, and each would be trained for itself",
        place(ranks[0]),
        ranks[0],
        place(ranks[1]),
        ranks[1]
    ))
    .with_remedy(
        "for tied weights, train with the copies that TiedParameter::new gives; for weights that are trained apart, give one an id of \
         its own: Param::from_tensor(param.val().detach())",
    ))
}

/// The first id that two ranks have, and these ranks.
fn on_two_ranks(ids: &[Vec<u64>]) -> Option<(u64, [usize; 2])> {
    let mut owners = HashMap::new();
    let mut each = ids.iter().enumerate().flat_map(|(rank, ids)| ids.iter().map(move |id| (*id, rank)));
    each.find_map(|(id, rank)| {
        let owner = *owners.entry(id).or_insert(rank);
        (owner != rank).then_some((id, [owner, rank]))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_on_two_ranks_if_it_is_in_two_lists() {
        assert_eq!(on_two_ranks(&[]), None);
        assert_eq!(on_two_ranks(&[vec![1, 2, 1], vec![], vec![3]]), None);
        assert_eq!(on_two_ranks(&[vec![1, 2], vec![3, 4], vec![4, 2]]), Some((4, [1, 2])));
        assert_eq!(on_two_ranks(&[vec![5, 2], vec![3], vec![2, 5]]), Some((2, [0, 2])));
    }
}
