//! Memory for results, which is not zeroed before they are written.

use std::mem::MaybeUninit;

/// `length` values that `write` writes.
///
/// # Safety
/// `write` has to write every one of them.
pub unsafe fn written(length: usize, write: impl FnOnce(&mut [MaybeUninit<f32>])) -> Vec<f32> {
    let mut values = Vec::with_capacity(length);
    write(&mut values.spare_capacity_mut()[..length]);
    // SAFETY: so many values fit, and the caller says that they have been written.
    unsafe { values.set_len(length) };
    values
}

/// Memory of values, for what also writes into memory that has none.
///
/// # Safety
/// Nothing but values may be written into it.
pub unsafe fn as_uninit(values: &mut [f32]) -> &mut [MaybeUninit<f32>] {
    let (pointer, length) = (values.as_mut_ptr(), values.len());
    // SAFETY: both types have the same layout, the slice stays borrowed, and the caller writes nothing but values.
    unsafe { std::slice::from_raw_parts_mut(pointer.cast(), length) }
}
