//! Address handles: the peers of datagrams.

use urnic_driver::{AddressVector, Destination, Refusal};
use urnic_rdma_core::*;

use super::pd::Pd;
use crate::from_c::{ToFree, objects};

/// An address handle: the part of libibverbs, then the part of the provider.
#[repr(C)]
pub(crate) struct Ah {
    /// Must be first: libibverbs' pointer is also the provider's.
    abi: ibv_ah,
    pub(super) destination: Destination,
}

objects! { Ah: ibv_ah; }

/// The addresses in the attributes of a handle or of a path.
pub(super) fn address_vector(ah: &ibv_ah_attr) -> AddressVector {
    AddressVector {
        is_global: ah.is_global != 0,
        dgid: ah.grh.dgid.raw,
        sgid_index: ah.grh.sgid_index,
        flow_label: ah.grh.flow_label,
        hop_limit: ah.grh.hop_limit,
        traffic_class: ah.grh.traffic_class,
        dlid: ah.dlid,
        sl: ah.sl,
        src_path_bits: ah.src_path_bits,
        static_rate: ah.static_rate,
        port: ah.port_num,
    }
}

/// `ibv_create_ah(3)`: EINVAL for an address that is not global, as for all Ethernet devices, or
/// whose source is not an address of this device of the same family.
pub(super) fn create_ah(pd: &Pd, attr: &ibv_ah_attr) -> Result<Box<Ah>, Refusal> {
    let destination = pd.context().driver.destination(&address_vector(attr))?;
    Ok(Box::new(Ah {
        abi: ibv_ah {
            context: pd.context().public(),
            pd: pd.public(),
            handle: 0,
        },
        destination,
    }))
}

/// `ibv_destroy_ah(3)`.
pub(super) fn destroy_ah(ah: ToFree<Ah>) -> Result<(), Refusal> {
    ah.free();
    Ok(())
}
