//! The memory of a collective.

use super::Counts;

/// The memory of a collective on this rank.
pub enum Memory<'a> {
    /// The result replaces the input.
    InPlace(&'a mut [u8]),
    /// Input and result do not overlap.
    OutOfPlace {
        /// What this rank contributes.
        input: &'a [u8],
        /// Where the result goes.
        output: &'a mut [u8],
    },
    /// Out of place, with counts: of the input by receiver, and of the output by sender.
    OutOfPlaceV {
        /// What this rank contributes, to each receiver after the other.
        input: &'a [u8],
        /// Where the result goes, from each sender after the other.
        output: &'a mut [u8],
        /// How many elements of the input each rank receives.
        sent: &'a Counts,
        /// How many elements of the output each rank has sent.
        received: &'a Counts,
    },
    /// In place, with a count for each rank.
    InPlaceV {
        /// Room for the elements of all ranks, by rank.
        data: &'a mut [u8],
        /// How many of the elements are each rank's.
        counts: &'a Counts,
    },
}
