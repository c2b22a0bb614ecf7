//! A convolution and its gradients, on slices.
//!
//! Nothing is copied nine times for a kernel of 3 x 3, as im2col does. [`Shape::unfold`] copies a sample once for each
//! *column* of the kernel, moved and strided as the column needs it, with the padding. A row of the kernel is then an offset
//! into that copy, so a convolution is one matrix product for each row, added up where the result lies. Operands lie as the
//! products want them, so that hardly any is packed.
//!
//! Samples are divided among rayon's threads. The gradient of the filters is added up in the order of the samples, so the same number of
//! threads gives the same bits.

use std::iter::zip;
use std::mem::MaybeUninit;
use std::ops::Range;

use gemm::{Parallelism, gemm};
use rayon::prelude::*;

use crate::memory::as_uninit;

/// Pixels that are transposed at a time: with 64 channels, as much as half of a first-level cache.
const BLOCK: usize = 64;

/// Samples and filters of `[samples, channels, height, width]` and `[outputs, inputs, kernel, kernel]`.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub inputs: usize,
    pub height: usize,
    pub width: usize,
    pub outputs: usize,
    pub kernel: usize,
    pub stride: usize,
    pub padding: usize,
}

impl Shape {
    /// Height and width of the result.
    pub fn output(&self) -> [usize; 2] {
        [self.height, self.width].map(|size| (size + 2 * self.padding - self.kernel) / self.stride + 1)
    }

    fn pixels(&self) -> usize {
        self.output().iter().product()
    }

    /// Of one sample of the input.
    fn sample(&self) -> usize {
        self.inputs * self.height * self.width
    }

    /// Planes of an unfolded sample: one for each column of the kernel and channel.
    fn planes(&self) -> usize {
        self.kernel * self.inputs
    }

    /// Rows of the input whose numbers are alike modulo the stride lie together, so that a stride over rows is none.
    fn phases(&self) -> usize {
        self.stride.min(self.kernel)
    }

    fn rows_of_phase(&self) -> usize {
        self.output()[0] + (self.kernel - 1) / self.stride
    }

    fn plane(&self) -> usize {
        self.phases() * self.rows_of_phase() * self.output()[1]
    }

    /// Where a plane begins for this row of the kernel.
    fn offset(&self, kernel_row: usize) -> usize {
        let row = (kernel_row % self.stride) * self.rows_of_phase() + kernel_row / self.stride;
        row * self.output()[1]
    }

    /// The columns of the result for which this column of the kernel does not lie in the padding, and the first of the
    /// input's columns that it sees.
    fn inside(&self, kernel_column: usize) -> (Range<usize>, usize) {
        let begin = self.padding.saturating_sub(kernel_column).div_ceil(self.stride);
        let end = (self.width + self.padding).saturating_sub(kernel_column).div_ceil(self.stride);
        let begin = begin.min(self.output()[1]);
        let end = end.clamp(begin, self.output()[1]);
        let first = (begin * self.stride + kernel_column).saturating_sub(self.padding);
        (begin..end, first.min(self.width))
    }

    /// Calls `visit` with the number of each row of an unfolded sample, the column of the kernel, and where the row of the
    /// input begins: nowhere in the padding.
    fn each_row(&self, mut visit: impl FnMut(usize, usize, Option<usize>)) {
        let mut number = 0;
        for column in 0..self.kernel {
            for channel in 0..self.inputs {
                for phase in 0..self.phases() {
                    for row in 0..self.rows_of_phase() {
                        let y = (row * self.stride + phase).checked_sub(self.padding);
                        let y = y.filter(|y| *y < self.height);
                        visit(number, column, y.map(|y| (channel * self.height + y) * self.width));
                        number += 1;
                    }
                }
            }
        }
    }

    fn unfold(&self, sample: &[f32], unfolded: &mut [f32]) {
        let width = self.output()[1];
        if self.stride == 1 && width == self.width {
            return self.unfold_planes(sample, unfolded);
        }
        let inside: Vec<_> = (0..self.kernel).map(|column| self.inside(column)).collect();
        self.each_row(|number, column, input| {
            let row = &mut unfolded[number * width..][..width];
            let Some(input) = input else { return row.fill(0.0) };
            let (inside, first) = inside[column].clone();
            row[..inside.start].fill(0.0);
            row[inside.end..].fill(0.0);
            let row = &mut row[inside];
            let input = &sample[input..][..self.width][first..];
            match self.stride {
                1 => row.copy_from_slice(&input[..row.len()]),
                stride => zip(row, input.iter().step_by(stride)).for_each(|(to, from)| *to = *from),
            }
        });
    }

    /// `unfold` where rows are as long as the input's: a channel is copied at once, moved by as many values as the column of the kernel is beside
    /// the middle. What came from the end of another row lies in the padding.
    fn unfold_planes(&self, sample: &[f32], unfolded: &mut [f32]) {
        let (width, pixels) = (self.width, self.height * self.width);
        let above = self.padding * width;
        for (column, planes) in unfolded.chunks_exact_mut(self.inputs * self.plane()).enumerate() {
            let (inside, _) = self.inside(column);
            let [left, right] = [self.padding.saturating_sub(column), column.saturating_sub(self.padding)]
                .map(|by| by.min(pixels));
            for (plane, channel) in zip(planes.chunks_exact_mut(self.plane()), sample.chunks_exact(pixels)) {
                plane[..above].fill(0.0);
                plane[above + pixels..].fill(0.0);
                let rows = &mut plane[above..][..pixels];
                rows[left..pixels - right].copy_from_slice(&channel[right..pixels - left]);
                if inside.len() < width {
                    for row in rows.chunks_exact_mut(width) {
                        row[..inside.start].fill(0.0);
                        row[inside.end..].fill(0.0);
                    }
                }
            }
        }
    }

    /// The reverse of `unfold`: adds each value to where it came from.
    fn fold(&self, unfolded: &[f32], sample: &mut [f32]) {
        let width = self.output()[1];
        let inside: Vec<_> = (0..self.kernel).map(|column| self.inside(column)).collect();
        self.each_row(|number, column, input| {
            let Some(input) = input else { return };
            let (inside, first) = inside[column].clone();
            let row = &unfolded[number * width..][..width][inside];
            let input = &mut sample[input..][..self.width][first..];
            match self.stride {
                1 => zip(input, row).for_each(|(to, from)| *to += from),
                stride => zip(input.iter_mut().step_by(stride), row).for_each(|(to, from)| *to += from),
            }
        });
    }

    /// Moves filters from their place into that of `index`, which takes output, input, row and column.
    fn arrange(&self, filters: &[f32], index: impl Fn([usize; 4]) -> usize) -> Vec<f32> {
        let mut arranged = vec![0.0; filters.len()];
        self.each_weight(|number, place| arranged[index(place)] = filters[number]);
        arranged
    }

    fn each_weight(&self, mut visit: impl FnMut(usize, [usize; 4])) {
        let mut number = 0;
        for output in 0..self.outputs {
            for input in 0..self.inputs {
                for row in 0..self.kernel {
                    for column in 0..self.kernel {
                        visit(number, [output, input, row, column]);
                        number += 1;
                    }
                }
            }
        }
    }
}

/// Writes the convolution of `x`, which is every value of `y`.
pub fn forward(shape: &Shape, x: &[f32], filters: &[f32], y: &mut [MaybeUninit<f32>]) {
    let (planes, pixels) = (shape.planes(), shape.pixels());
    assert!(shape.kernel > 0, "a convolution without a kernel");
    let filters = shape.arrange(filters, |[output, input, row, column]| {
        (row * shape.outputs + output) * planes + column * shape.inputs + input
    });
    let scratch = || vec![0.0; planes * shape.plane()];
    each_sample((x, shape.sample()), (y, shape.outputs * pixels), scratch, |unfolded, x, y| {
        shape.unfold(x, unfolded);
        for (row, filters) in filters.chunks_exact(planes * shape.outputs).enumerate() {
            let left = Columns { values: &unfolded[shape.offset(row)..], stride: shape.plane() };
            let right = Columns { values: filters, stride: planes };
            // SAFETY: the first row writes what the others add to.
            unsafe { multiply([pixels, shape.outputs, planes], left, right, y, pixels, row > 0) };
        }
    });
}

/// Calls `compute` with each sample of `from`, its place in `to` and what `scratch` made for the thread. Both come with the length of a sample.
fn each_sample<T: Send>(
    (from, from_length): (&[f32], usize),
    (to, to_length): (&mut [T], usize),
    scratch: impl Fn() -> Vec<f32> + Sync + Send,
    compute: impl Fn(&mut [f32], &[f32], &mut [T]) + Sync + Send,
) {
    let samples = from.len() / from_length;
    assert_eq!(
        (from.len(), to.len()),
        (samples * from_length, samples * to_length),
        "tensors that do not fit"
    );
    if rayon::current_num_threads() == 1 {
        // Without a change to the pool's only thread.
        let mut scratch = scratch();
        let samples = zip(from.chunks_exact(from_length), to.chunks_exact_mut(to_length));
        return samples.for_each(|(from, to)| compute(&mut scratch, from, to));
    }
    let samples = from.par_chunks_exact(from_length).zip(to.par_chunks_exact_mut(to_length));
    samples.for_each_init(scratch, |scratch, (from, to)| compute(scratch, from, to));
}

/// Whether the gradient of the input is a convolution too: then [`backward_input_without_stride`] writes it.
pub fn is_turned(shape: &Shape) -> bool {
    shape.stride == 1 && shape.padding < shape.kernel
}

/// `dx`, which is zero, becomes the gradient of the input.
pub fn backward_input(shape: &Shape, filters: &[f32], dy: &[f32], dx: &mut [f32]) {
    let (planes, pixels) = (shape.planes(), shape.pixels());
    let filters = shape.arrange(filters, |[output, input, row, column]| {
        (row * planes + column * shape.inputs + input) * shape.outputs + output
    });
    let scratch = || vec![0.0; planes * shape.plane()];
    each_sample((dy, shape.outputs * pixels), (dx, shape.sample()), scratch, |unfolded, dy, dx| {
        unfolded.fill(0.0);
        for (row, filters) in filters.chunks_exact(planes * shape.outputs).enumerate() {
            let left = Columns { values: dy, stride: pixels };
            let right = Columns { values: filters, stride: shape.outputs };
            let to = &mut unfolded[shape.offset(row)..];
            // SAFETY: it is all values, and values are written.
            unsafe {
                let to = as_uninit(to);
                multiply([pixels, planes, shape.outputs], left, right, to, shape.plane(), true);
            }
        }
        shape.fold(unfolded, dx);
    });
}

/// Writes the convolution of the gradient with the filters turned by half a circle, which is every value of `dx`.
pub fn backward_input_without_stride(
    shape: &Shape,
    filters: &[f32],
    dy: &[f32],
    dx: &mut [MaybeUninit<f32>],
) {
    let [height, width] = shape.output();
    let last = shape.kernel - 1;
    let turned = Shape {
        inputs: shape.outputs,
        outputs: shape.inputs,
        height,
        width,
        padding: last - shape.padding,
        ..*shape
    };
    let filters = shape.arrange(filters, |[output, input, row, column]| {
        ((input * shape.outputs + output) * shape.kernel + last - row) * shape.kernel + last - column
    });
    forward(&turned, dy, &filters, dx);
}

/// `dw` becomes the gradient of the filters, over all samples.
pub fn backward_filters(shape: &Shape, x: &[f32], dy: &[f32], dw: &mut [f32]) {
    let (planes, outputs) = (shape.planes(), shape.outputs);
    let (x_sample, dy_sample) = (shape.sample(), outputs * shape.pixels());
    let samples = (x.len() / x_sample).div_ceil(rayon::current_num_threads()).max(1);
    let sums = match samples * x_sample >= x.len() {
        true => sums_of(shape, x, dy),
        false => {
            let parts = x.par_chunks(samples * x_sample).zip(dy.par_chunks(samples * dy_sample));
            let parts: Vec<Vec<f32>> = parts.map(|(x, dy)| sums_of(shape, x, dy)).collect();
            let add = |mut sums: Vec<f32>, part: Vec<f32>| {
                zip(&mut sums, part).for_each(|(sum, part)| *sum += part);
                sums
            };
            parts.into_iter().reduce(add).unwrap_or_default()
        }
    };
    shape.each_weight(|number, [output, input, row, column]| {
        dw[number] = sums[(row * planes + column * shape.inputs + input) * outputs + output];
    });
}

/// The gradient of the filters over these samples, by the kernel's row and column, the input and the output.
fn sums_of(shape: &Shape, x: &[f32], dy: &[f32]) -> Vec<f32> {
    let (planes, pixels, outputs) = (shape.planes(), shape.pixels(), shape.outputs);
    let mut unfolded = vec![0.0; planes * shape.plane()];
    let mut channels_last = vec![0.0; pixels * outputs];
    let mut sums = vec![0.0; shape.kernel * planes * outputs];
    for (x, dy) in zip(x.chunks_exact(shape.sample()), dy.chunks_exact(outputs * pixels)) {
        shape.unfold(x, &mut unfolded);
        transpose(dy, pixels, outputs, &mut channels_last);
        for (row, sums) in sums.chunks_exact_mut(planes * outputs).enumerate() {
            let left = Columns { values: &channels_last, stride: outputs };
            let right = Columns { values: &unfolded[shape.offset(row)..], stride: shape.plane() };
            // SAFETY: it is all values, and values are written.
            unsafe { multiply([outputs, planes, pixels], left, right, as_uninit(sums), outputs, true) };
        }
    }
    sums
}

/// `[outputs, pixels]` to `[pixels, outputs]`.
fn transpose(from: &[f32], pixels: usize, outputs: usize, to: &mut [f32]) {
    for (block, to) in to.chunks_mut(BLOCK * outputs).enumerate() {
        for (output, from) in from.chunks_exact(pixels).enumerate() {
            let from = &from[block * BLOCK..];
            zip(to.chunks_exact_mut(outputs), from).for_each(|(to, from)| to[output] = *from);
        }
    }
}

/// A matrix column by column, one every `stride` values.
#[derive(Clone, Copy)]
struct Columns<'a> {
    values: &'a [f32],
    stride: usize,
}

/// Writes the product of `left`, of m x k, and `right`, of k x n, as columns of `stride`, or adds it to the values that are there.
///
/// # Safety
/// If it adds, there have to be values.
unsafe fn multiply(
    [m, n, k]: [usize; 3],
    left: Columns<'_>,
    right: Columns<'_>,
    product: &mut [MaybeUninit<f32>],
    stride: usize,
    add: bool,
) {
    let values = |columns: usize, stride: usize, rows: usize| {
        let last = (columns - 1).checked_mul(stride).and_then(|last| last.checked_add(rows));
        last.expect("no slice is so long")
    };
    assert!(m > 0 && n > 0 && k > 0 && stride >= m && product.len() >= values(n, stride, m));
    assert!(left.values.len() >= values(k, left.stride, m));
    assert!(right.values.len() >= values(n, right.stride, k));
    let columns = [stride, left.stride, right.stride].map(|stride| stride as isize);
    // SAFETY: the product reads and writes the first m or k values of n or k columns, all of which lie in the slices. It reads what it
    // writes to only if it adds, and then there are values, as the caller says.
    // Nobody else writes into them, and columns of the product do not overlap, because they are at least as far apart as
    // they are long.
    unsafe {
        gemm(
            m,
            n,
            k,
            product.as_mut_ptr().cast::<f32>(),
            columns[0],
            1,
            add,
            left.values.as_ptr(),
            columns[1],
            1,
            right.values.as_ptr(),
            columns[2],
            1,
            1.0,
            1.0,
            false,
            false,
            false,
            Parallelism::None,
        );
    }
}
