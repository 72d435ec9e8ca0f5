//! Sizes and offsets that the interface guarantees.

use super::*;

const _: () = {
    use std::mem::{offset_of, size_of};
    assert!(size_of::<Command>() == COMMAND_LEN);
    assert!(offset_of!(Command, payload) == 32);
    assert!(size_of::<Completion>() == COMPLETION_LEN);
    assert!(offset_of!(Completion, payload) == 8);
    assert!(offset_of!(Completion, phase) == 60);
    assert!(size_of::<CreateEq>() == 24);
    assert!(size_of::<CreateMr>() == 40);
    assert!(size_of::<ModifyMr>() == 48);
    assert!(size_of::<CreateCq>() == 32);
    assert!(size_of::<ResizeCq>() == 16);
    assert!(size_of::<ModerateCq>() == 16);
    assert!(size_of::<CreateSrq>() == 32);
    assert!(size_of::<CreateQp>() == 80);
    assert!(offset_of!(CreateQp, pd) == 24);
    assert!(offset_of!(CreateQp, sq_log_size) == 48);
    assert!(size_of::<ModifyQp>() == 40);
    assert!(size_of::<QpStatus>() == 32);
    assert!(size_of::<DeviceAttributes>() == 80);
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_and_results_come_back() {
        let c = Command::new(Opcode::AllocPd, &Handle { id: 7.into() });
        assert_eq!(c.arguments::<Handle>().id.get(), 7);
        assert_eq!(Opcode::from_raw(c.opcode.get()), Some(Opcode::AllocPd));
        let r = Completion::new(3, Status::Busy, &Count { count: 9.into() });
        assert_eq!(r.result::<Count>().count.get(), 9);
        assert_eq!(
            (r.tag.get(), r.status.get(), r.phase.get()),
            (3, Status::Busy as u16, 0)
        );
    }

    #[test]
    fn a_refused_argument_has_a_name() {
        let mut refused = Completion::new(3, Status::InvalidArgument, &Nothing {});
        assert_eq!(refused.argument_of(Opcode::CreateCq), None);
        refused.argument = (1 + std::mem::offset_of!(CreateCq, log_size) as u32).into();
        assert_eq!(refused.argument_of(Opcode::CreateCq), Some("log_size"));
        assert_eq!(refused.argument_of(Opcode::AllocPd), None);
        refused.argument = u32::MAX.into();
        assert_eq!(refused.argument_of(Opcode::CreateCq), Some("flags"));
    }
}
