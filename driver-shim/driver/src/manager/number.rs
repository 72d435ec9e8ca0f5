//! Numbers of streams, listeners and queue pairs in the process: the device's slot and the device's
//! own number, which has 24 bits.

use rustix::io::Errno;

/// Bits of a device's number.
const BITS: u32 = 24;

/// Most slots.
const SLOTS: usize = 1 << (u32::BITS - BITS);

/// The place of an open device among those that the process has opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Slot(u8);

impl Slot {
    /// The slot at this index; `None` if there are no more.
    pub(crate) fn at(index: usize) -> Option<Slot> {
        (index < SLOTS).then_some(Slot(u8::try_from(index).ok()?))
    }

    pub(crate) fn index(self) -> usize {
        self.0.into()
    }

    /// The process's number of an object with this number of the device.
    ///
    /// # Errors
    /// `EIO` if the device gave a number with more bits than its interface allows.
    pub(crate) fn number(self, of_device: u32) -> Result<u32, Errno> {
        match of_device >> BITS {
            0 => Ok(u32::from(self.0) << BITS | of_device),
            _ => Err(Errno::IO),
        }
    }

    /// The slot and the device's number of an object.
    pub(crate) fn split(number: u32) -> (Slot, u32) {
        (Slot((number >> BITS) as u8), number & ((1 << BITS) - 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_names_slot_and_object() {
        for index in [0, 1, 255] {
            let slot = Slot::at(index).unwrap();
            for of_device in [0, 1, 0xff_ffff] {
                let number = slot.number(of_device).unwrap();
                assert_eq!(Slot::split(number), (slot, of_device));
            }
            assert_eq!(slot.number(1 << 24), Err(Errno::IO));
        }
        assert_eq!(Slot::at(256), None);
    }
}
