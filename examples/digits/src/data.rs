//! The bundled digits: gzip-compressed IDX files.

use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use burn::tensor::{Device, Int, Tensor, TensorData};
use flate2::bufread::MultiGzDecoder;

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
    ///
    /// # Errors
    /// If a file is missing, cut off, joined with another or otherwise damaged; has images of another size, or a label above 9; or both have
    /// unequal numbers, or none.
    pub fn read(folder: &Path, half: &str) -> Result<Self> {
        let [images, of_images] =
            ["images-idx3", "labels-idx1"].map(|kind| folder.join(format!("{half}-{kind}-ubyte.gz")));
        let ([count, rows, columns], pixels) = read_idx(&images)?;
        let ([labelled], labels) = read_idx(&of_images)?;
        ensure!(
            (rows, columns) == (SIDE, SIDE),
            "{} has images of {rows} x {columns}, not {SIDE} x {SIDE}",
            images.display()
        );
        ensure!(
            count == labelled && count > 0,
            "{} has {count} images, {} {labelled} labels: they must be as many, and one at least",
            images.display(),
            of_images.display()
        );
        if let Some(place) = labels.iter().position(|label| *label > 9) {
            bail!("{}: label {place} is {}, and digits are 0 to 9", of_images.display(), labels[place]);
        }
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

/// The most bytes of a file, without its header.
const MAX_BYTES: usize = 1 << 30;

/// The sizes and bytes of an IDX file: 0, 0, 8 for bytes, the number of dimensions, then each as a big-endian u32.
fn read_idx<const D: usize>(path: &Path) -> Result<([usize; D], Vec<u8>)> {
    let file = File::open(path).with_context(|| {
        format!("cannot open {}: say where the digits are with --data FOLDER", path.display())
    })?;
    // A file of several members is one: none of them may be lost.
    let mut file = MultiGzDecoder::new(BufReader::new(file));
    let damaged = || format!("{} is damaged, cut off, or no gzip file: download it again", path.display());
    let unusable = || format!("{} cannot be used", path.display());
    let mut header = Vec::new();
    file.by_ref().take((4 + 4 * D) as u64).read_to_end(&mut header).with_context(damaged)?;
    let sizes = sizes::<D>(&header).with_context(unusable)?;
    let wanted = sizes.iter().try_fold(1_usize, |all, size| all.checked_mul(*size));
    // Before any memory is taken: a small file becomes a thousand times as large.
    let wanted = wanted
        .filter(|wanted| *wanted <= MAX_BYTES)
        .with_context(|| format!("its header asks for {sizes:?} bytes, more than {MAX_BYTES}"))
        .with_context(unusable)?;
    let mut bytes = Vec::new();
    file.by_ref().take(wanted as u64).read_to_end(&mut bytes).with_context(damaged)?;
    let found = bytes.len() as u64 + io::copy(&mut file, &mut io::sink()).with_context(damaged)?;
    ensure!(
        found == wanted as u64,
        "{}: its header asks for {sizes:?} bytes, and {found} follow: it is cut off, or another file was joined to it",
        unusable()
    );
    Ok((sizes, bytes))
}

/// What the header of an IDX file says.
fn sizes<const D: usize>(header: &[u8]) -> Result<[usize; D]> {
    ensure!(
        header.len() == 4 + 4 * D && header[..3] == [0, 0, 8] && usize::from(header[3]) == D,
        "it is not an IDX file of bytes with {D} dimensions"
    );
    let mut sizes = [0; D];
    for (size, bytes) in sizes.iter_mut().zip(header[4..].as_chunks::<4>().0) {
        *size = u32::from_be_bytes(*bytes) as usize;
    }
    Ok(sizes)
}
