//! Outputs of steps, merged from those of all ranks.

use burn::tensor::kind::Basic;
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn::train::{ClassificationOutput, MultiLabelClassificationOutput, RegressionOutput, SequenceOutput};
use phalanx::{Error, Result};

use crate::read_back;

/// The output of a step, in a form from which metrics of all ranks can be computed.
///
/// ```
/// # use burn::tensor::{Device, Tensor, TensorData};
/// use phalanx_burn::train::{Outputs, concatenated, mean_of, read};
///
/// struct Embeddings {
///     loss: Tensor<1>,
///     vectors: Tensor<2>,
/// }
///
/// impl Outputs for Embeddings {
///     fn into_tensors(self) -> phalanx::Result<Vec<TensorData>> {
///         Ok(vec![read(self.loss)?, read(self.vectors)?])
///     }
///
///     fn together(ranks: Vec<Vec<TensorData>>, device: &Device) -> phalanx::Result<Self> {
///         Ok(Self { loss: mean_of(&ranks, 0, 1, device)?, vectors: concatenated(&ranks, 1, device)? })
///     }
/// }
/// ```
pub trait Outputs: Sized {
    /// Its tensors: always the same number, in the same order.
    ///
    /// # Errors
    /// If a device cannot give one: see [`read`].
    fn into_tensors(self) -> Result<Vec<TensorData>>;

    /// One output made of several ranks' tensors, each as [`into_tensors`](Self::into_tensors) returned them.
    ///
    /// # Errors
    /// If tensors are missing or do not fit together.
    fn together(ranks: Vec<Vec<TensorData>>, device: &Device) -> Result<Self>;
}

/// The elements of `tensor`, when its device has computed them.
///
/// # Errors
/// If the device cannot give them. Burn's `into_data` panics then.
pub fn read<const D: usize, K: Basic>(tensor: Tensor<D, K>) -> Result<TensorData> {
    read_back::data(tensor)
}

/// All ranks' tensors number `index`, concatenated along the first dimension.
///
/// # Errors
/// If a rank has no such tensor, or one of another rank or shape.
pub fn concatenated<const D: usize>(
    ranks: &[Vec<TensorData>],
    index: usize,
    device: &Device,
) -> Result<Tensor<D>> {
    let parts = each::<D>(ranks, index)?;
    let tensor = |data: &TensorData| Tensor::from_data(data.clone(), (device, data.dtype()));
    Ok(Tensor::cat(parts.into_iter().map(tensor).collect(), 0))
}

fn concatenated_ints<const D: usize>(
    ranks: &[Vec<TensorData>],
    index: usize,
    device: &Device,
) -> Result<Tensor<D, Int>> {
    let parts = each::<D>(ranks, index)?;
    let tensor = |data: &TensorData| Tensor::from_data(data.clone(), (device, data.dtype()));
    Ok(Tensor::cat(parts.into_iter().map(tensor).collect(), 0))
}

/// The mean of all ranks' tensors number `index`, such as losses, weighted by the number of rows of the rank's tensor
/// number `samples`. A rank whose tensor has no rows does not count, and may have a loss that is no number.
///
/// # Errors
/// If a rank has no such tensors, or `index` is not one number on each.
pub fn mean_of(
    ranks: &[Vec<TensorData>],
    index: usize,
    samples: usize,
    device: &Device,
) -> Result<Tensor<1>> {
    let (mut sum, mut count) = (0.0, 0.0);
    for tensors in ranks {
        let (Some(value), Some(rows)) = (tensors.get(index), tensors.get(samples)) else {
            return Err(missing(index));
        };
        let rows = rows.shape().first().copied().unwrap_or(0);
        // The mean over no samples is no number, and counts for nothing.
        if rows == 0 {
            continue;
        }
        let (1, Some(value)) = (value.num_elements(), value.iter::<f64>().next()) else {
            return Err(Error::mismatch("a rank's loss is not one number"));
        };
        sum += rows as f64 * value;
        count += rows as f64;
    }
    Ok(Tensor::from_data([sum / count], device))
}

fn each<const D: usize>(ranks: &[Vec<TensorData>], index: usize) -> Result<Vec<&TensorData>> {
    let parts: Vec<_> = ranks
        .iter()
        .map(|tensors| tensors.get(index).ok_or_else(|| missing(index)))
        .collect::<Result<_>>()?;
    let like = |other: &&TensorData| {
        other.rank() == D
            && other.dtype() == parts[0].dtype()
            && other.shape().as_slice()[1..] == parts[0].shape().as_slice()[1..]
    };
    if parts.is_empty() || !parts.iter().all(|part| part.rank() == D && like(part)) {
        return Err(Error::mismatch(format!("the ranks' output tensors number {index} do not fit together"))
            .with_remedy("outputs may differ between ranks in the number of samples alone"));
    }
    Ok(parts)
}

fn missing(index: usize) -> Error {
    Error::mismatch(format!("a rank's output has no tensor number {index}"))
}

macro_rules! outputs {
    ($($output:ty => $targets:ident),*) => {$(
        impl Outputs for $output {
            fn into_tensors(self) -> Result<Vec<TensorData>> {
                Ok(vec![read(self.loss)?, read(self.output)?, read(self.targets)?])
            }

            fn together(ranks: Vec<Vec<TensorData>>, device: &Device) -> Result<Self> {
                Ok(Self {
                    loss: mean_of(&ranks, 0, 1, device)?,
                    output: concatenated(&ranks, 1, device)?,
                    targets: $targets(&ranks, 2, device)?,
                })
            }
        }
    )*};
}
outputs!(
    ClassificationOutput => concatenated_ints,
    MultiLabelClassificationOutput => concatenated_ints,
    RegressionOutput => concatenated
);

impl Outputs for SequenceOutput {
    fn into_tensors(self) -> Result<Vec<TensorData>> {
        let mut tensors = vec![read(self.loss)?, read(self.logits)?, read(self.targets)?];
        tensors.extend(self.predictions.map(read).transpose()?);
        Ok(tensors)
    }

    /// Sequences of all ranks must be padded to the same length.
    fn together(ranks: Vec<Vec<TensorData>>, device: &Device) -> Result<Self> {
        let predicted = ranks.iter().any(|tensors| tensors.len() > 3);
        Ok(Self {
            loss: mean_of(&ranks, 0, 1, device)?,
            logits: concatenated(&ranks, 1, device)?,
            targets: concatenated_ints(&ranks, 2, device)?,
            predictions: predicted.then(|| concatenated_ints(&ranks, 3, device)).transpose()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_without_samples_does_not_count_in_a_mean() {
        let device = Device::flex();
        let output = |loss: f32, rows: usize| {
            vec![TensorData::from([loss]), TensorData::new(vec![0.0f32; 3 * rows], [rows, 3])]
        };
        let mean = |ranks: &[Vec<TensorData>]| mean_of(ranks, 0, 1, &device).unwrap().into_scalar::<f32>();
        assert_eq!(mean(&[output(4.0, 1), output(f32::NAN, 0), output(1.0, 2)]), 2.0);
        // As in one process: the mean of nothing, and a loss that is no number.
        assert!(mean(&[output(f32::NAN, 0)]).is_nan());
        assert!(mean(&[output(f32::NAN, 1), output(1.0, 1)]).is_nan());
    }
}
