//! Parameters that stand in stages of two ranks, and stages that are taken for replicas.
//!
//! In one process they are one parameter, which gets both gradients. Here each rank would train its copy by the gradient of its own
//! stages, and the copies would drift apart. A rank sees only its own stages, so the ranks compare ids, which copies have in common: those
//! of one record, or of one `Param` that was cloned. Copies that were made each by itself have ids of their own, and look like any two
//! parameters.

use std::collections::HashMap;

use burn::module::ParamId;
use phalanx::{Buffer, Caller, Communicator, Error, Rank, Result, WorldSize};

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

/// An error on every rank if ranks of the pipeline, which have different stages, are ranks of one `Ddp`, whose group is `replicas`: that has
/// given them one rank's stages, and would average the gradients of different ones. All ranks call it together.
pub(super) fn check_replicas<const D: usize>(
    pipeline: &Pipeline<D>,
    replicas: &dyn Communicator,
) -> Result<()> {
    if pipeline.plan.ranks() == 1 {
        return Ok(());
    }
    // Which group it is: a number that its first rank draws, as those of new parameters are.
    let mut mark = Buffer::from_slice(&[ParamId::new().val() as i64]);
    if replicas.world_size() != WorldSize::ONE {
        mark = replicas.in_call(Caller::PipelineTrain).broadcast_async(mark, Rank::MAIN)?.wait()?;
    }
    let mark = mark.as_slice::<i64>()?.first().copied().unwrap_or_default();
    let marks = pipeline.group.in_call(Caller::PipelineTrain).all_gather_object(&vec![mark as u64])?;
    let Some((_, [first, second])) = on_two_ranks(&marks) else { return Ok(()) };
    Err(Error::invalid_argument(format!(
        "ranks {first} and {second} of the pipeline have different stages, and are in one Ddp, which takes them for replicas: both have the \
         stages of one rank now"
    ))
    .with_remedy("make the Ddp of the ranks that have the same stages, such as mesh.group(\"data\"), or of ProcessGroup::alone()"))
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
