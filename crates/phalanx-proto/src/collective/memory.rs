//! The memory of a collective.

use super::Counts;

/// The memory of a collective on this rank.
pub enum Memory<'a> {
    /// The result replaces the input.
    InPlace(&'a mut [u8]),
    /// Input and result do not overlap.
    OutOfPlace { input: &'a [u8], output: &'a mut [u8] },
    /// Out of place, with counts: of the input by receiver, and of the output by sender.
    OutOfPlaceV { input: &'a [u8], output: &'a mut [u8], sent: &'a Counts, received: &'a Counts },
    /// In place, with a count for each rank.
    InPlaceV { data: &'a mut [u8], counts: &'a Counts },
}
