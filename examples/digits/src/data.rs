//! The bundled digits: gzip-compressed IDX files.

use std::fs::File;
use std::io::{BufReader, Read};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use burn::tensor::{Device, Int, Tensor, TensorData};
use flate2::bufread::GzDecoder;

/// The folder with the bundled digits.
pub const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../data/mnist-10k");

/// Images of one size, and which digit each shows.
pub struct Digits {
    pixels: Vec<u8>,
    labels: Vec<u8>,
}

/// Some of them as tensors.
#[derive(Clone, Debug)]
pub struct Batch {
    /// `[images, 28, 28]`, normalised.
    pub images: Tensor<3>,
    /// `[images]`: 0 to 9.
    pub labels: Tensor<1, Int>,
}

const SIDE: usize = 28;

impl Digits {
    /// Reads one half of the data set: `train` or `t10k`.
    pub fn read(folder: &Path, half: &str) -> Result<Self> {
        let pixels = read_idx(&folder.join(format!("{half}-images-idx3-ubyte.gz")), 3)?;
        let labels = read_idx(&folder.join(format!("{half}-labels-idx1-ubyte.gz")), 1)?;
        ensure!(
            pixels.len() == labels.len() * SIDE * SIDE,
            "{half}: the numbers of images and labels differ"
        );
        Ok(Self { pixels, labels })
    }

    /// How many there are.
    #[allow(clippy::len_without_is_empty, reason = "there are always some")]
    pub fn len(&self) -> usize {
        self.labels.len()
    }

    /// The digits with these indices.
    pub fn batch(&self, indices: &[usize], device: &Device) -> Batch {
        let image = |&index: &usize| &self.pixels[index * SIDE * SIDE..][..SIDE * SIDE];
        // The mean and the standard deviation of all pixels.
        let pixels: Vec<f32> = indices
            .iter()
            .flat_map(image)
            .map(|&pixel| (f32::from(pixel) / 255.0 - 0.1307) / 0.3081)
            .collect();
        let labels: Vec<i64> = indices.iter().map(|&index| i64::from(self.labels[index])).collect();
        Batch {
            images: Tensor::from_data(TensorData::new(pixels, [indices.len(), SIDE, SIDE]), device),
            labels: Tensor::from_data(TensorData::new(labels, [indices.len()]), device),
        }
    }
}

/// The bytes of an IDX file: 0, 0, 8 for bytes, the number of dimensions, then each as a big-endian u32.
fn read_idx(path: &Path, dimensions: u8) -> Result<Vec<u8>> {
    let file = File::open(path).with_context(|| {
        format!("cannot open {}: say where the digits are with --data FOLDER", path.display())
    })?;
    let mut bytes = Vec::new();
    GzDecoder::new(BufReader::new(file))
        .read_to_end(&mut bytes)
        .with_context(|| format!("{} is not a gzip file", path.display()))?;
    let header = 4 + 4 * usize::from(dimensions);
    ensure!(
        bytes.len() >= header && bytes[..4] == [0, 0, 8, dimensions],
        "{} is not an IDX file of bytes with {dimensions} dimensions",
        path.display()
    );
    let sizes = bytes[4..header].as_chunks::<4>().0.iter().map(|size| u32::from_be_bytes(*size) as usize);
    ensure!(sizes.product::<usize>() == bytes.len() - header, "{} is cut short", path.display());
    Ok(bytes.split_off(header))
}
