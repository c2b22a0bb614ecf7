//! The little linear algebra that low-rank compression needs: products with a few columns.

/// Sums side by side, so that additions need not wait for each other and fill vector registers.
const LANES: usize = 16;

/// `a · b`.
pub(super) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let (a_lanes, a_rest) = a.as_chunks::<LANES>();
    let (b_lanes, b_rest) = b.as_chunks::<LANES>();
    let mut sums = [0.0f32; LANES];
    for (a, b) in a_lanes.iter().zip(b_lanes) {
        for lane in 0..LANES {
            sums[lane] += a[lane] * b[lane];
        }
    }
    let rest: f32 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
    sums.iter().sum::<f32>() + rest
}

/// `y += factor · x`.
pub(super) fn add_scaled(y: &mut [f32], factor: f32, x: &[f32]) {
    y.iter_mut().zip(x).for_each(|(y, x)| *y += factor * x);
}

/// `p = m · q`: `m` has `columns` columns, row by row; `p` and `q` lie column by column.
pub(super) fn times(m: &[f32], columns: usize, q: &[f32], p: &mut [f32]) {
    let rows = m.len() / columns;
    for (row, m) in m.chunks_exact(columns).enumerate() {
        for (q, p) in q.chunks_exact(columns).zip(p.chunks_exact_mut(rows)) {
            p[row] = dot(m, q);
        }
    }
}

/// `q = mᵀ · p`, laid out as in [`times`].
pub(super) fn transposed_times(m: &[f32], columns: usize, p: &[f32], q: &mut [f32]) {
    let rows = m.len() / columns;
    q.fill(0.0);
    for (row, m) in m.chunks_exact(columns).enumerate() {
        for (p, q) in p.chunks_exact(rows).zip(q.chunks_exact_mut(columns)) {
            add_scaled(q, p[row], m);
        }
    }
}

/// `m = p · qᵀ`, laid out as in [`times`].
pub(super) fn outer(p: &[f32], q: &[f32], columns: usize, m: &mut [f32]) {
    let rows = m.len() / columns;
    m.fill(0.0);
    for (row, m) in m.chunks_exact_mut(columns).enumerate() {
        for (p, q) in p.chunks_exact(rows).zip(q.chunks_exact(columns)) {
            add_scaled(m, p[row], q);
        }
    }
}

/// Makes the columns, each of `length`, orthonormal (Gram-Schmidt, modified); a column that depends on those before it
/// becomes zero.
pub(super) fn orthogonalize(columns: &mut [f32], length: usize, epsilon: f32) {
    for column in 0..columns.len() / length.max(1) {
        let (done, rest) = columns.split_at_mut(column * length);
        let current = &mut rest[..length];
        let before = dot(current, current).sqrt();
        for other in done.chunks_exact(length) {
            let share = dot(current, other);
            add_scaled(current, -share, other);
        }
        let norm = dot(current, current).sqrt();
        // The rest of a dependent column is rounding; as a direction it would be noise.
        let factor = if norm > before * 1e-6 { 1.0 / (norm + epsilon) } else { 0.0 };
        current.iter_mut().for_each(|x| *x *= factor);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_are_those_of_the_definition() {
        let (rows, columns, rank) = (5, 37, 2);
        let wave =
            |count: usize, scale: f32| (0..count).map(|i| (i as f32 * scale).sin()).collect::<Vec<f32>>();
        let (m, q) = (wave(rows * columns, 0.3), wave(columns * rank, 0.7));
        let mut p = vec![0.0; rows * rank];
        times(&m, columns, &q, &mut p);
        let mut back = vec![0.0; columns * rank];
        transposed_times(&m, columns, &p, &mut back);
        let mut product = vec![0.0; rows * columns];
        outer(&p, &q, columns, &mut product);
        for r in 0..rank {
            for i in 0..rows {
                let expected: f32 = (0..columns).map(|j| m[i * columns + j] * q[r * columns + j]).sum();
                assert!((p[r * rows + i] - expected).abs() < 1e-4);
            }
            for j in 0..columns {
                let expected: f32 = (0..rows).map(|i| m[i * columns + j] * p[r * rows + i]).sum();
                assert!((back[r * columns + j] - expected).abs() < 1e-3);
            }
        }
        let expected: f32 = (0..rank).map(|r| p[r * rows + 3] * q[r * columns + 7]).sum();
        assert!((product[3 * columns + 7] - expected).abs() < 1e-5);
    }

    #[test]
    fn columns_become_orthonormal_and_dependent_ones_zero() {
        let mut columns: Vec<f32> = (0..60).map(|i| ((i * i) as f32 * 0.37).cos()).collect();
        let (first, copy) = columns.split_at_mut(40);
        copy.copy_from_slice(&first[..20]);
        orthogonalize(&mut columns, 20, 0.0);
        let of = |a: usize, b: usize| dot(&columns[a * 20..][..20], &columns[b * 20..][..20]);
        assert!((of(0, 0) - 1.0).abs() < 1e-5 && (of(1, 1) - 1.0).abs() < 1e-5 && of(0, 1).abs() < 1e-5);
        assert_eq!(of(2, 2), 0.0);
    }
}
