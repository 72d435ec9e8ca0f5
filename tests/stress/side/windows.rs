//! The windows of a round are bound before it and end after it.

use urnic_rdma_core::*;

use super::{Side, signaled};
use crate::layout::REGION;
use crate::plan::{Ending, Part, World};
use crate::verbs::{Binding, Mw, Work};

impl Side {
    pub(super) fn bind(&mut self, part: &Part) {
        self.bound.clear();
        for window in &part.windows {
            let id = self.id();
            let (mw, link) = (&self.windows[window.slot], &mut self.links[window.link]);
            let binding = Binding {
                mr: &self.mrs[window.at / REGION],
                address: self.arena.address(window.at),
                len: window.len as u64,
                access: window.access,
            };
            link.sends.push_back((id, IBV_WC_BIND_MW));
            if window.kind == IBV_MW_TYPE_1 {
                link.qp.bind(mw, id, &binding);
            } else {
                let work = Work::Bind(mw, mw.next_key(), binding);
                link.qp.post(&mut [signaled(id, work)]);
            }
            self.bound.push(mw.key());
        }
        self.wait("binding windows");
    }

    pub(super) fn unbind(&mut self, part: &Part, world: &World) {
        for (i, window) in part.windows.iter().enumerate() {
            let id = self.id();
            let (mw, link) = (&self.windows[window.slot], &mut self.links[window.link]);
            match window.ending {
                Ending::Invalidated => {}
                Ending::Freed => {
                    let kind = world.hosts[self.number].windows[window.slot];
                    self.windows[window.slot] = Mw::new(&self.device, kind);
                }
                Ending::Unbound if window.kind == IBV_MW_TYPE_1 => {
                    let mr = &self.mrs[window.at / REGION];
                    link.sends.push_back((id, IBV_WC_BIND_MW));
                    link.qp.bind(
                        mw,
                        id,
                        &Binding {
                            mr,
                            address: 0,
                            len: 0,
                            access: 0,
                        },
                    );
                }
                Ending::Unbound => {
                    link.sends.push_back((id, IBV_WC_LOCAL_INV));
                    link.qp.post(&mut [signaled(id, Work::LocalInv(self.bound[i]))]);
                }
            }
        }
        self.wait("unbinding windows");
    }
}
