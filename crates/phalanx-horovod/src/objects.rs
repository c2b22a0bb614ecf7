//! Values that can be serialised, parameters, and sparse gradients: made of the collectives.

use phalanx::group::MAX_OBJECT_BYTES;
use phalanx::{Buffer, Caller, DType, Element, Error, Rank, Result};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::horovod::Horovod;
use crate::tensor::Tensor;
use phalanx::adapter::copy_of;
use phalanx::adapter::elements::scale;
use phalanx_proto::horovod::controller::ranks;
use phalanx_proto::horovod::reduction::Op;
use phalanx_proto::wire::object;

/// The gradient of a tensor of which few rows have one: the numbers of these rows, and what is to be added to them. A row may
/// occur more than once.
#[doc(alias = "IndexedSlices")]
#[derive(Debug)]
pub struct SparseGradient {
    /// The numbers of the rows.
    pub indices: Vec<i64>,
    /// As many rows.
    pub values: Tensor,
}

/// Sent in place of the length by a rank that has no value, or one that it cannot serialise: the others need an answer all
/// the same.
const UNWRITTEN: i64 = -1;
/// Sent in place of the length by a rank that brings no value.
const NONE: i64 = -2;
/// Sent in place of the root where every rank brings a value.
const EVERY: i64 = -1;

/// # Values, parameters and sparse gradients
impl Horovod {
    /// Returns the root's `value` on every rank. The other ranks' value is not read, and may be `None`.
    ///
    /// ```
    /// use phalanx::Rank;
    /// let hvd = phalanx_horovod::init()?;
    /// assert_eq!(hvd.broadcast_object("epoch", Some(&7u32), Rank::MAIN)?, 7);
    /// # Ok::<(), phalanx::Error>(())
    /// ```
    ///
    /// # Errors
    /// As a collective; if the ranks name several roots; if the root has no value, cannot serialise it, or has joined; if it is
    /// longer than [`MAX_OBJECT_BYTES`]; and if this rank cannot read it.
    pub fn broadcast_object<T: Serialize + DeserializeOwned>(
        &self,
        name: &str,
        value: Option<&T>,
        root: Rank,
    ) -> Result<T> {
        if root.get() >= self.size() {
            let cause = format!("root {root} is outside a world of {}", self.size());
            self.refuse(&lengths_of(name), &cause);
            return Err(Error::invalid_argument(cause)
                .with_remedy(format!("name a rank from 0 to {}", self.size() - 1)));
        }
        let own = (self.rank() == root).then(|| match value {
            Some(value) => written(value),
            None => Err(Error::invalid_argument(format!("{name:?}: the root must bring a value"))),
        });
        let (_, bytes) = self.gather_bytes(name, own, &[root])?;
        read(bytes.as_slice()?, root)
    }

    /// Returns all ranks' values on every rank, by rank.
    ///
    /// # Errors
    /// As a collective; if a rank cannot serialise its value, or has joined; if all together are longer than
    /// [`MAX_OBJECT_BYTES`]; and if this rank cannot read them.
    pub fn allgather_object<T: Serialize + DeserializeOwned>(&self, name: &str, value: &T) -> Result<Vec<T>> {
        let ranks: Vec<Rank> = (0..self.size()).map(Rank::new).collect();
        let (lengths, bytes) = self.gather_bytes(name, Some(written(value)), &ranks)?;
        let mut rest: &[u8] = bytes.as_slice()?;
        let values = ranks.into_iter().zip(lengths).map(|(rank, length)| {
            let (value, others) =
                rest.split_at_checked(length).ok_or_else(|| unreadable(rank, "bytes of it are missing"))?;
            rest = others;
            read(value, rank)
        });
        values.collect()
    }

    /// The bytes of all ranks `from`, one after the other, and how many each has; these ranks bring their `own`. The lengths
    /// come first, so that every rank refuses what one lacks or cannot write, or what is too long together, before it takes
    /// memory for it.
    fn gather_bytes(
        &self,
        name: &str,
        own: Option<Result<Vec<u8>>>,
        from: &[Rank],
    ) -> Result<(Vec<usize>, Tensor)> {
        let root = if let [root] = from { i64::from(root.get()) } else { EVERY };
        let length = match &own {
            Some(Ok(bytes)) => bytes.len() as i64,
            Some(Err(_)) => UNWRITTEN,
            None => NONE,
        };
        let announced = self.allgather(&lengths_of(name), [root, length])?;
        let own = own.transpose()?.unwrap_or_default();
        let (announced, _) = announced.as_slice::<i64>()?.as_chunks::<2>();
        if let Some(&[other, _]) = announced.iter().find(|[other, _]| *other != root) {
            let called = |root: i64| match root {
                EVERY => "allgather_object".to_owned(),
                root => format!("broadcast_object with root {root}"),
            };
            let (ours, theirs) = (called(root), called(other));
            return Err(Error::mismatch(format!("{name:?}: this rank called {ours}, another {theirs}"))
                .with_remedy("all ranks must call with the same root"));
        }
        let lengths: Vec<i64> =
            announced.iter().map(|[_, length]| *length).filter(|length| *length != NONE).collect();
        if lengths.len() != from.len() {
            return Err(Error::mismatch(format!(
                "{name:?}: {} values came where {} should bring one: a rank that has joined brings none",
                lengths.len(),
                ranks(from.iter().map(|rank| rank.index()))
            ))
            .with_remedy("all ranks must call before one that has a value joins"));
        }
        let lengths = lengths.iter().zip(from).map(|(length, rank)| {
            usize::try_from(*length).map_err(|_| {
                Error::mismatch(format!("{name:?}: rank {rank} could not write its object"))
                    .with_peer(*rank)
                    .with_remedy(format!("rank {rank}'s own error says why"))
            })
        });
        let lengths = lengths.collect::<Result<Vec<usize>>>()?;
        let total = lengths.iter().fold(0usize, |total, length| total.saturating_add(*length));
        if total > MAX_OBJECT_BYTES {
            return Err(Error::invalid_argument(format!(
                "{name:?}: the objects take {total} bytes; they may take {MAX_OBJECT_BYTES} (MAX_OBJECT_BYTES)"
            ))
            .with_remedy("send large data as tensors"));
        }
        Ok((lengths, self.allgather(name, own)?))
    }

    /// Overwrites each of `parameters`, which have names, with those of the root. For the start of a training, and after a
    /// checkpoint was read on the root. Their order may be another on every rank, as that of a map.
    ///
    /// ```
    /// use phalanx::Rank;
    /// let hvd = phalanx_horovod::init()?;
    /// let (mut weight, mut bias) = ([0.5f32; 6], [0.0f32; 2]);
    /// hvd.broadcast_parameters([("weight", &mut weight[..]), ("bias", &mut bias[..])], Rank::MAIN)?;
    /// # Ok::<(), phalanx::Error>(())
    /// ```
    ///
    /// # Errors
    /// As a collective: also if a rank has a parameter of another name, length or type. If this rank has no memory for a copy, which ends the job.
    /// Parameters are then unspecified.
    pub fn broadcast_parameters<'a, T: Element>(
        &self,
        parameters: impl IntoIterator<Item = (&'a str, &'a mut [T])>,
        root: Rank,
    ) -> Result<()> {
        // In one order on all ranks: each waits for its first ones before it submits the next.
        let mut parameters = Vec::from_iter(parameters);
        parameters.sort_by_key(|(name, _)| *name);
        let (mut flying, mut failure) = (Vec::new(), None);
        let mut bytes = 0;
        for (name, parameter) in parameters {
            // No more copies at once than a batch has.
            bytes += size_of_val(&*parameter);
            if bytes > self.options().fusion_threshold {
                // The others may have submitted the next ones: of other lengths, they divide them in another way.
                let landed = land(&mut flying);
                failure = failure.or(landed.err());
                bytes = size_of_val(&*parameter);
            }
            // The others wait for what this rank does not submit.
            let copy = Buffer::try_from_slice(parameter).inspect_err(|error| self.leave_with(error))?;
            match self.broadcast_async(&format!("broadcast.{name}"), copy, root) {
                Ok(handle) => flying.push((handle, parameter)),
                // The others wait for the next ones, too.
                Err(error) => failure = failure.or(Some(error)),
            }
        }
        let landed = land(&mut flying);
        failure.or(landed.err()).map_or(Ok(()), Err)
    }

    /// Combines sparse gradients: every rank gets the rows of all ranks, in the order of the ranks, which its optimizer adds up.
    ///
    /// ```
    /// use phalanx_horovod::{Op, SparseGradient, Tensor};
    /// let hvd = phalanx_horovod::init()?;
    /// let rows = Tensor::from([1.0f32, 2.0, 3.0, 4.0]).reshaped([2, 2])?;
    /// let gradient = SparseGradient { indices: vec![3, 70_000], values: rows };
    /// let all = hvd.allreduce_sparse("embedding", gradient, Op::Average)?;
    /// assert_eq!(all.indices, [3, 70_000]);
    /// # Ok::<(), phalanx::Error>(())
    /// ```
    ///
    /// # Errors
    /// As a collective, also if the ranks' operations differ; if there is not one index for each row; and for operations other than
    /// [`Op::Sum`] and [`Op::Average`].
    #[doc(alias = "sparse_allreduce_async")]
    pub fn allreduce_sparse(&self, name: &str, gradient: SparseGradient, op: Op) -> Result<SparseGradient> {
        let made = self.sparse_parts(name, gradient, op);
        let (factor, parts) = made.inspect_err(|error| self.refuse(name, &error.full_cause()))?;
        let mut gathered = self.grouped_allgather(name, parts)?;
        let (Some(mut values), Some(indices)) = (gathered.pop(), gathered.pop()) else {
            return Err(Error::aborted("an allgather of two tensors has another number of results"));
        };
        let dtype: DType = values.dtype();
        scale(dtype, values.as_bytes_mut(), factor)?;
        Ok(SparseGradient { indices: copy_of(indices.as_slice()?)?, values })
    }

    /// What is gathered of a sparse gradient, and the factor of the values that come.
    fn sparse_parts(&self, name: &str, gradient: SparseGradient, op: Op) -> Result<(f64, Vec<Tensor>)> {
        let SparseGradient { indices, values } = gradient;
        let (factor, made) = match op {
            Op::Sum => (1.0, Caller::SumOfSparse),
            Op::Average => (1.0 / f64::from(self.size()), Caller::AverageOfSparse),
            Op::Min | Op::Max | Op::Product | Op::Adasum => {
                return Err(Error::invalid_argument(format!("{op} is not defined for sparse gradients"))
                    .with_remedy("use Op::Sum or Op::Average, or make the gradient dense"));
            }
        };
        if op == Op::Average && !values.dtype().is_float() {
            return Err(Error::invalid_argument(format!("average is not defined for {}", values.dtype()))
                .with_remedy("use Op::Sum, or convert to f32 or f64"));
        }
        if values.shape().first() != Some(&indices.len()) {
            return Err(Error::invalid_argument(format!(
                "{name:?}: {} indices for values of the shape {:?}",
                indices.len(),
                values.shape()
            ))
            .with_remedy("give one row of values for each index"));
        }
        let mut indices = Tensor::from(indices);
        // All that travels is rows: what each rank makes of them is compared, too.
        indices.stand_for(made);
        Ok((factor, vec![indices, values]))
    }
}

/// The name under which ranks tell each other how long the objects of `name` are.
fn lengths_of(name: &str) -> String {
    format!("{name}.length")
}

/// Waits for all of these, also after the first error: their names can then be used again.
fn land<T: Element>(flying: &mut Vec<(crate::Handle<Tensor>, &mut [T])>) -> Result<()> {
    let mut failure = None;
    for (handle, parameter) in flying.drain(..) {
        match handle.synchronize() {
            Ok(tensor) => parameter.copy_from_slice(tensor.as_slice()?),
            Err(error) => failure = failure.or(Some(error)),
        }
    }
    failure.map_or(Ok(()), Err)
}

fn written<T: Serialize>(value: &T) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    object::write(value, &mut bytes, "the object")?;
    Ok(bytes)
}

fn read<T: DeserializeOwned>(bytes: &[u8], from: Rank) -> Result<T> {
    match postcard::take_from_bytes(bytes) {
        Ok((value, [])) => Ok(value),
        Ok((_, rest)) => Err(unreadable(from, &format!("{} bytes are left over", rest.len()))),
        Err(error) => Err(unreadable(from, &error.to_string())),
    }
}

fn unreadable(from: Rank, cause: &str) -> Error {
    Error::mismatch(format!("the object of rank {from} is not what this rank expects: {cause}"))
        .with_peer(from)
        .with_remedy("every rank must call with the same type")
}
