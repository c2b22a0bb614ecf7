//! How the members of a control block divide the work on their memory.

use super::LENGTH;

/// How the members divide the work of a call in place. Each publishes it with its call, and memory is lent to others only if
/// all have given the same: then no two members write the same bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Division {
    /// The memory is divided among the first so many members, at least one.
    pub owners: usize,
    /// Their shares are multiples of so many bytes, a power of two, except for the last.
    pub unit: usize,
    /// Whether members write into their blocks of the others' windows, and do not read whole windows.
    pub combines_windows: bool,
}

/// The place of the unit's logarithm, above the kind of memory.
const UNIT: u32 = 2;
const LONGEST_UNIT: u32 = 15;
/// The place of the number of owners, above the offset.
const OWNERS: u32 = LENGTH.count_ones();
const MOST_OWNERS: usize = (1 << 15) - 1;
const COMBINES_WINDOWS: u64 = 1 << 63;

impl Division {
    /// The bits of a header's word that are a division.
    pub(super) const MASK: u64 =
        (LONGEST_UNIT as u64) << UNIT | (MOST_OWNERS as u64) << OWNERS | COMBINES_WINDOWS;

    /// # Panics
    /// If it cannot be encoded: a mistake of the caller.
    pub(super) fn bits(self) -> u64 {
        let Self { owners, unit, combines_windows } = self;
        assert!((1..=MOST_OWNERS).contains(&owners), "{owners} members cannot divide anything");
        assert!(unit.is_power_of_two() && unit.trailing_zeros() <= LONGEST_UNIT, "no unit has {unit} bytes");
        let windows = if combines_windows { COMBINES_WINDOWS } else { 0 };
        u64::from(unit.trailing_zeros()) << UNIT | (owners as u64) << OWNERS | windows
    }

    /// The division that is in these bits; None for a call that is not in place.
    pub(super) fn of(bits: u64) -> Option<Self> {
        let owners = (bits >> OWNERS) as usize & MOST_OWNERS;
        let unit = 1 << ((bits >> UNIT) as u32 & LONGEST_UNIT);
        (owners > 0).then_some(Self { owners, unit, combines_windows: bits & COMBINES_WINDOWS != 0 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_division_comes_back_as_it_was_beside_any_offset() {
        for (owners, unit) in [(1, 1), (2, 64), (256, 8), (MOST_OWNERS, 1 << LONGEST_UNIT)] {
            for combines_windows in [false, true] {
                let division = Division { owners, unit, combines_windows };
                assert_eq!(division.bits() & !Division::MASK, 0);
                assert_eq!(Division::of(division.bits() | super::super::OFFSET | 3), Some(division));
            }
        }
        assert_eq!(Division::of(super::super::OFFSET | 3), None);
    }
}
