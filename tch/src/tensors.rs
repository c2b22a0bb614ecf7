//! The tensors of a `VarStore`, and how they travel.

mod inventory;

use std::cmp::Reverse;

use phalanx::adapter::copy_of;
use phalanx::reducer::{StateTensor, broadcast_state, states_identical};
use phalanx::{Communicator, Error, Rank, Result};
use tch::{Device, Tensor};

pub(crate) use self::inventory::{Inventory, Named, Shared, check_trained, handles, shared};
use crate::shim;

/// Copies the elements of all `tensors`, gives them to `change`, and copies them back. Elements that several tensors share are given once.
///
/// `change` never sees the tensors' own memory: it may run code of others, such as a communicator of the program's own, which can reach
/// the tensors through handles.
pub(crate) fn with_elements<T>(
    tensors: &[Tensor],
    change: impl FnOnce(&mut [StateTensor<'_>]) -> Result<T>,
) -> Result<T> {
    let rows = rows(tensors)?;
    let copy = |(index, row): &(usize, Tensor)| {
        let bytes = shim::bytes(row).ok_or_else(|| without_memory(*index))?;
        Ok((shim::dtype(row.kind())?, copy_of(bytes)?))
    };
    let mut copies = rows.iter().map(copy).collect::<Result<Vec<_>>>()?;
    let mut parts: Vec<_> =
        copies.iter_mut().map(|(dtype, bytes)| StateTensor { dtype: *dtype, bytes }).collect();
    let outcome = change(&mut parts)?;
    for ((index, _), (_, bytes)) in rows.iter().zip(&copies) {
        write_elements(&tensors[*index], bytes)?;
    }
    Ok(outcome)
}

/// Gives `look` the elements of all `tensors`, and leaves the tensors alone: autograd refuses to run backward through one that was
/// written since. Elements that several tensors share are given once.
///
/// Each tensor's elements are looked at before the next one's are taken: see [`with_elements`].
pub(crate) fn read_elements<T>(
    tensors: &[Tensor],
    look: impl FnOnce(&mut dyn Iterator<Item = &[u8]>) -> Result<T>,
) -> Result<T> {
    let rows = rows(tensors)?;
    let mut unreadable = None;
    let mut parts = rows.iter().map(|(index, row)| {
        shim::bytes(row).unwrap_or_else(|| {
            unreadable = Some(*index);
            &[]
        })
    });
    let outcome = look(&mut parts)?;
    unreadable.map_or(Ok(outcome), |index| Err(without_memory(index)))
}

/// The elements of each tensor, row by row.
pub(crate) fn copies(tensors: &[Tensor]) -> Result<Vec<Vec<u8>>> {
    tensors.iter().map(copy).collect()
}

/// The elements of `tensor`, row by row.
pub(crate) fn copy(tensor: &Tensor) -> Result<Vec<u8>> {
    read_elements(&[tensor.shallow_clone()], |parts| copy_of(parts.next().unwrap_or_default()))
}

/// Writes `elements`, row by row, to `tensor`.
pub(crate) fn write_elements(tensor: &Tensor, elements: &[u8]) -> Result<()> {
    if shim::is_plain(tensor) && !shim::is_here(tensor) {
        return shim::write(tensor, elements);
    }
    let _guard = tch::no_grad_guard();
    let mut tensor = tensor.f_detach().map_err(torch)?;
    let is_rows = tensor.is_contiguous();
    let mut row = if is_rows { tensor.shallow_clone() } else { tensor.f_contiguous().map_err(torch)? };
    match shim::bytes_mut(&mut row) {
        Some(bytes) if bytes.len() == elements.len() => bytes.copy_from_slice(elements),
        Some(bytes) => {
            return Err(Error::invalid_argument(format!(
                "a variable's size has changed meanwhile from {} B to {} B",
                elements.len(),
                bytes.len()
            )));
        }
        None => return Err(Error::invalid_argument("a variable has no memory of this machine any more")),
    }
    if !is_rows {
        tensor.f_copy_(&row).map_err(torch)?;
    }
    Ok(())
}

/// Of the tensors that [`distinct`] names, the position and the elements row by row in this machine's memory: in place where they lie so.
fn rows(tensors: &[Tensor]) -> Result<Vec<(usize, Tensor)>> {
    let _guard = tch::no_grad_guard();
    let row = |index: usize| {
        let row =
            tensors[index].f_detach().and_then(|tensor| tensor.f_to_device(Device::Cpu)?.f_contiguous());
        let row = row.map_err(torch)?;
        if shim::is_plain(&row) { Ok((index, row)) } else { Err(without_memory(index)) }
    };
    distinct(tensors).into_iter().map(row).collect()
}

fn without_memory(index: usize) -> Error {
    Error::invalid_argument(format!("tensor {index} has no memory of this machine"))
}

/// Where the elements of a tensor lie: from `begin`, the first element's address, to `end`, behind the last one's.
struct Extent {
    begin: usize,
    end: usize,
    /// Whether the elements between are all the tensor's.
    is_rows: bool,
    /// The steps between elements and the number of these steps, in an order that transposed tensors have in common.
    strides: Vec<(i64, i64)>,
    index: usize,
}

/// Those of all tensors that have elements; one that has all elements of another comes before it.
fn extents(tensors: &[Tensor]) -> Vec<Extent> {
    let extent = |(index, tensor): (usize, &Tensor)| {
        let sides = tensor.size().into_iter().zip(tensor.stride());
        let mut strides: Vec<(i64, i64)> =
            sides.filter(|(side, _)| *side > 1).map(|(side, stride)| (stride, side - 1)).collect();
        strides.sort_unstable();
        let last: i64 = strides.iter().map(|(stride, steps)| stride * steps).sum();
        let begin = tensor.data_ptr() as usize;
        let bytes = (usize::try_from(last).unwrap_or(0) + 1) * tensor.kind().elt_size_in_bytes();
        Extent { begin, end: begin + bytes, is_rows: tensor.is_contiguous(), strides, index }
    };
    let mut extents: Vec<_> =
        tensors.iter().enumerate().filter(|(_, tensor)| tensor.numel() > 0).map(extent).collect();
    extents.sort_by_key(|one| (one.begin, Reverse(one.end), !one.is_rows, one.index));
    extents
}

/// The positions of the tensors, without those all of whose elements another one has.
fn distinct(tensors: &[Tensor]) -> Vec<usize> {
    let (mut kept, mut rows_end): (Vec<Extent>, usize) = (Vec::new(), 0);
    for extent in extents(tensors) {
        let is_same = |other: &&Extent| other.begin == extent.begin && other.end == extent.end;
        let has_all = |other: &Extent| other.strides == extent.strides;
        if extent.end <= rows_end || kept.iter().rev().take_while(is_same).any(has_all) {
            continue;
        }
        if extent.is_rows {
            rows_end = extent.end;
        }
        kept.push(extent);
    }
    // The same order on every rank.
    let mut kept: Vec<usize> = kept.into_iter().map(|extent| extent.index).collect();
    kept.sort_unstable();
    kept
}

/// Of each tensor the first one with which it shares memory, if that is not itself. Tensors whose elements lie between each other's, such as
/// the columns of a matrix, count as sharing.
pub(crate) fn sharing(tensors: &[Tensor]) -> Vec<Option<usize>> {
    let mut shared = vec![None; tensors.len()];
    let extents = extents(tensors);
    let mut rest = &extents[..];
    while let Some(first) = rest.first() {
        let mut end = first.end;
        let overlapping = rest.iter().take_while(|one| {
            let overlaps = one.begin < end;
            end = end.max(one.end);
            overlaps
        });
        let (together, behind) = rest.split_at(overlapping.count());
        let lowest = together.iter().map(|one| one.index).min();
        for one in together.iter().filter(|one| Some(one.index) != lowest) {
            shared[one.index] = lowest;
        }
        rest = behind;
    }
    shared
}

/// The gradients that are there, each in memory of its own, to be changed in place. Backward may leave those of several parameters in one memory,
/// as it does for the terms of a sum: what one of them is multiplied by would change the others, too.
pub(crate) fn own_gradients(parameters: &[Named]) -> Result<Vec<Tensor>> {
    let _guard = tch::no_grad_guard();
    let gradients = parameters.iter().map(|one| (one, one.tensor.grad()));
    let mut gradients: Vec<(&Named, Tensor)> = gradients.filter(|(_, gradient)| gradient.defined()).collect();
    // A sparse one does not lie in one piece of memory.
    let plain: Vec<usize> =
        (0..gradients.len()).filter(|&index| shim::is_plain(&gradients[index].1)).collect();
    let handles: Vec<Tensor> = plain.iter().map(|&index| gradients[index].1.shallow_clone()).collect();
    for (&index, first) in plain.iter().zip(sharing(&handles)) {
        if first.is_some() {
            let (parameter, gradient) = &mut gradients[index];
            let mut own = gradient.f_empty_like().map_err(torch)?;
            own.f_copy_(gradient).map_err(torch)?;
            shim::set_gradient(&parameter.tensor, Some(&own))?;
            *gradient = own;
        }
    }
    Ok(gradients.into_iter().map(|(_, gradient)| gradient).collect())
}

/// All ranks take over `tensors` of rank `root`.
pub(crate) fn from_rank(group: &dyn Communicator, root: Rank, tensors: &[Tensor]) -> Result<()> {
    with_elements(tensors, |parts| broadcast_state(group, root, parts))
}

/// Whether `tensors` are the same bits on every rank.
pub(crate) fn identical(group: &dyn Communicator, tensors: &[Tensor]) -> Result<bool> {
    read_elements(tensors, |parts| states_identical(group, parts))
}

/// An error of libtorch's, without the stack that follows in further lines.
pub(crate) fn torch(error: tch::TchError) -> Error {
    shim::error_of(&error.to_string()).with_source(error)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "helpers of tests are tests")]
mod tests {
    use phalanx::Rank;
    use tch::Kind;

    use super::*;

    #[test]
    fn of_tensors_that_share_memory_each_element_is_given() {
        let all = Tensor::arange(12, (Kind::Float, Device::Cpu));
        let (head, tail, middle) = (all.narrow(0, 0, 4), all.narrow(0, 8, 4), all.narrow(0, 6, 4));
        let table = all.view([3, 4]);
        // Both end at the ninth element, and have others before.
        let (column, even) = (table.select(1, 0), all.slice(0, 0, 9, 2));
        let handles = |tensors: &[&Tensor]| tensors.iter().map(|one| one.shallow_clone()).collect::<Vec<_>>();
        let of = |tensors: &[&Tensor]| distinct(&handles(tensors));
        // The longer one, whichever comes first; a part that begins elsewhere; the same, transposed.
        assert_eq!(of(&[&head, &all]), [1]);
        assert_eq!(of(&[&all, &head, &middle]), [0]);
        assert_eq!(of(&[&table.tr(), &table]), [1]);
        assert_eq!(of(&[&table.tr(), &table.tr()]), [0]);
        assert_eq!(of(&[&tail, &head]), [0, 1]);
        assert_eq!(of(&[&tail, &middle]), [0, 1]);
        assert_eq!(of(&[&column, &even, &column]), [0, 1]);

        let shares = |tensors: &[&Tensor]| sharing(&handles(tensors));
        assert_eq!(shares(&[&tail, &head, &all.copy()]), [None; 3]);
        assert_eq!(shares(&[&tail, &head, &middle]), [None, None, Some(0)]);
        assert_eq!(shares(&[&head, &all.copy(), &all, &tail]), [None, None, Some(0), Some(0)]);

        let tensors = [head, all.shallow_clone(), tail, middle, column, even];
        for tensors in [&tensors[..2], &tensors[2..4], &tensors[4..]] {
            drop(tch::no_grad(|| all.shallow_clone().fill_(1.0)));
            with_elements(tensors, |parts| {
                parts.iter_mut().for_each(|part| part.bytes.fill(0));
                Ok(())
            })
            .unwrap();
            assert!(tensors.iter().all(|tensor| tensor.abs().sum(Kind::Float).double_value(&[]) == 0.0));
        }
    }

    #[test]
    fn memory_and_devices_are_one_rank_s_and_other_errors_the_program_s() {
        let is_a_peers = |text: &str| {
            let error = torch(tch::TchError::Torch(text.to_owned()));
            error.at(Rank::new(1), "host").is_a_peers(Rank::MAIN)
        };
        assert!(is_a_peers("CUDA out of memory. Tried to allocate 20.00 GiB.\nException raised from malloc"));
        assert!(is_a_peers("DefaultCPUAllocator: not enough memory: you tried to allocate 1 bytes."));
        assert!(is_a_peers("CUDA error: an illegal memory access was encountered"));
        assert!(is_a_peers("std::bad_alloc"));
        assert!(is_a_peers("CUDA driver error: unknown error"));
        assert!(is_a_peers(
            "cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling `cusolverDnCreate(handle)`"
        ));
        assert!(!is_a_peers("The size of tensor a (2) must match the size of tensor b (3)"));
    }
}
