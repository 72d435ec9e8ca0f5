//! PCI configuration space: a type 0 header, a PCI Express and an MSI-X capability.

use urnic_device::pci;

/// Length of the configuration space in bytes: that of PCI Express, whose extended part is empty
/// here.
pub(crate) const LEN: usize = 4096;

/// Offset of the pending bits in BAR 4; the table is at 0.
pub(crate) const PBA_OFFSET: u32 = 0x800;
/// Length of BAR 4 in bytes.
pub(crate) const BAR_MSIX_LEN: u64 = 4096;
/// Vectors for which there is room in the table.
pub(crate) const MAX_VECTORS: u32 = PBA_OFFSET / 16;

const COMMAND: usize = 0x04;
const STATUS: usize = 0x06;
const BARS: usize = 0x10;
const CAPABILITIES: usize = 0x34;
const INTERRUPT_LINE: usize = 0x3c;
const EXPRESS: usize = 0x40;
const DEVICE_CONTROL: usize = EXPRESS + 8;
/// Initiate Function Level Reset, in the high byte of Device Control.
const FUNCTION_RESET: u8 = 1 << 7;
const MSIX: usize = 0x80;

/// Bits of the command register that a driver may set: memory space, bus master, parity and SERR
/// response, interrupt disable.
const COMMAND_WRITABLE: u16 = 0x0546;
/// Status bit: the function has a list of capabilities.
const STATUS_CAPABILITIES: u16 = 1 << 4;
const CAP_EXPRESS: u8 = 0x10;
const CAP_MSIX: u8 = 0x11;
/// MSI-X message control: enable, and mask all.
const MSIX_WRITABLE: u16 = 0xc000;

/// The configuration space of a function.
#[derive(Debug)]
pub(crate) struct ConfigSpace {
    bytes: Box<[u8; LEN]>,
    /// Bits that a write changes; the others stay.
    writable: Box<[u8; LEN]>,
}

impl ConfigSpace {
    /// The configuration space of a function with BARs of the lengths `bars` (powers of two, 0 =
    /// absent) and `vectors` interrupt vectors.
    pub(crate) fn new(bars: [u64; 6], vectors: u32) -> ConfigSpace {
        let mut space = ConfigSpace {
            bytes: Box::new([0; LEN]),
            writable: Box::new([0; LEN]),
        };
        space.set16(0x00, pci::VENDOR_ID);
        space.set16(0x02, pci::DEVICE_ID);
        space.set32(0x08, pci::CLASS_CODE << 8 | 1);
        space.set16(0x2c, pci::VENDOR_ID);
        space.set16(0x2e, pci::DEVICE_ID);
        space.allow16(COMMAND, COMMAND_WRITABLE);
        space.set16(STATUS, STATUS_CAPABILITIES);
        space.bytes[CAPABILITIES] = EXPRESS as u8;
        space.writable[INTERRUPT_LINE] = 0xff;
        for (bar, len) in bars.into_iter().enumerate().filter(|(_, len)| *len != 0) {
            // 32-bit memory, not prefetchable: the low four bits are 0. Only the bits above the
            // length keep a written value, so that the owner finds the length by writing ones.
            space.allow32(BARS + 4 * bar, !(len as u32 - 1));
        }

        space.bytes[EXPRESS] = CAP_EXPRESS;
        space.bytes[EXPRESS + 1] = MSIX as u8;
        // Version 2, an endpoint; it can be reset as a function; 8-bit tags; errors are not
        // reported.
        space.set16(EXPRESS + 2, 2);
        space.set32(EXPRESS + 4, 1 << 28 | 1 << 15 | 1 << 5);
        // Device control: error reporting, relaxed ordering, payload and request size.
        space.allow16(DEVICE_CONTROL, 0x7fff);
        // One lane of 2.5 GT/s, in the capabilities and in the status.
        space.set32(EXPRESS + 0x0c, 1 << 4 | 1);
        space.set16(EXPRESS + 0x12, 1 << 4 | 1);

        space.bytes[MSIX] = CAP_MSIX;
        space.set16(MSIX + 2, vectors.clamp(1, MAX_VECTORS) as u16 - 1);
        space.allow16(MSIX + 2, MSIX_WRITABLE);
        space.set32(MSIX + 4, pci::BAR_MSIX.into());
        space.set32(MSIX + 8, PBA_OFFSET | u32::from(pci::BAR_MSIX));
        space
    }

    fn set16(&mut self, at: usize, value: u16) {
        self.bytes[at..at + 2].copy_from_slice(&value.to_le_bytes());
    }

    fn set32(&mut self, at: usize, value: u32) {
        self.bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
    }

    fn allow16(&mut self, at: usize, bits: u16) {
        self.writable[at..at + 2].copy_from_slice(&bits.to_le_bytes());
    }

    fn allow32(&mut self, at: usize, bits: u32) {
        self.writable[at..at + 4].copy_from_slice(&bits.to_le_bytes());
    }

    /// The bytes at `offset`, if they are inside of the configuration space.
    pub(crate) fn read(&self, offset: usize, len: usize) -> Option<&[u8]> {
        self.bytes.get(offset..offset.checked_add(len)?)
    }

    /// Writes the writable bits of `data` at `offset`. Returns whether the write requests a
    /// function reset, or `None` if it is not inside of the configuration space.
    pub(crate) fn write(&mut self, offset: usize, data: &[u8]) -> Option<bool> {
        let range = offset..offset.checked_add(data.len())?;
        let bytes = self.bytes.get_mut(range.clone())?;
        for ((byte, may), new) in bytes.iter_mut().zip(&self.writable[range]).zip(data) {
            *byte = *byte & !may | new & may;
        }
        // The reset bit always reads as 0.
        let high = (DEVICE_CONTROL + 1).checked_sub(offset);
        Some(
            high.and_then(|at| data.get(at))
                .is_some_and(|byte| byte & FUNCTION_RESET != 0),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn space() -> ConfigSpace {
        ConfigSpace::new([4096, 0, 16 << 20, 0, 4096, 0], 9)
    }

    fn word(space: &ConfigSpace, at: usize) -> u32 {
        u32::from_le_bytes(space.read(at, 4).unwrap().try_into().unwrap())
    }

    #[test]
    fn the_header_identifies_the_function() {
        let space = space();
        assert_eq!(word(&space, 0), 0x524e_fffe);
        assert_eq!(word(&space, 8) >> 8, pci::CLASS_CODE);
        assert_eq!(space.read(0x0e, 1), Some(&[0][..]), "type 0, one function");
    }

    #[test]
    fn bars_are_sized_by_writing_ones() {
        let mut space = space();
        for (at, len) in [
            (0x10, 4096u32),
            (0x14, 0),
            (0x18, 16 << 20),
            (0x1c, 0),
            (0x20, 4096),
            (0x24, 0),
        ] {
            space.write(at, &[0xff; 4]).unwrap();
            let size = word(&space, at);
            assert_eq!((!size).wrapping_add(1), len, "{at:#x}");
            space.write(at, &0xfe12_3456u32.to_le_bytes()).unwrap();
            assert_eq!(
                word(&space, at),
                if len == 0 { 0 } else { 0xfe12_3456 & !(len - 1) }
            );
        }
        // No expansion ROM.
        space.write(0x30, &[0xff; 4]).unwrap();
        assert_eq!(word(&space, 0x30), 0);
    }

    #[test]
    fn the_capabilities_form_a_list() {
        let space = space();
        let mut found = Vec::new();
        let mut at = usize::from(space.read(CAPABILITIES, 1).unwrap()[0]);
        while at != 0 {
            let cap = space.read(at, 2).unwrap();
            found.push(cap[0]);
            at = usize::from(cap[1]);
        }
        assert_eq!(found, [CAP_EXPRESS, CAP_MSIX]);
        assert_eq!(word(&space, MSIX) >> 16, 8, "nine vectors");
        assert_eq!(word(&space, MSIX + 8), 0x804);
    }

    #[test]
    fn a_bit_of_device_control_requests_a_function_reset() {
        let mut space = space();
        assert_eq!(space.write(DEVICE_CONTROL, &[0xff, 0x7f]), Some(false));
        assert_eq!(space.write(DEVICE_CONTROL, &[0, 0x80]), Some(true));
        assert_eq!(space.write(DEVICE_CONTROL + 1, &[0x80]), Some(true));
        assert_eq!(
            space.write(DEVICE_CONTROL - 2, &[0xff, 0xff, 0, 0x80]),
            Some(true)
        );
        assert_eq!(space.write(DEVICE_CONTROL + 2, &[0xff; 8]), Some(false));
        assert_eq!(space.read(DEVICE_CONTROL + 1, 1), Some(&[0][..]));
    }

    #[test]
    fn only_what_a_driver_may_change_changes() {
        let mut space = space();
        let before = space.bytes.clone();
        space.write(0, &[0xff; LEN]).unwrap();
        assert_eq!(word(&space, 0), 0x524e_fffe);
        assert_eq!(word(&space, COMMAND), 0x0010_0546);
        assert_eq!(word(&space, MSIX) >> 16, 0xc008);
        space.write(0, &[0; LEN]).unwrap();
        assert_eq!(space.bytes, before);
        assert!(space.write(LEN - 1, &[0; 2]).is_none() && space.write(usize::MAX, &[0; 2]).is_none());
        assert!(space.read(LEN - 1, 2).is_none() && space.read(usize::MAX, 2).is_none());
    }
}
