//! Compares the Rust layouts with the C compiler's and the installed `<infiniband/verbs.h>`, and
//! the run-time tables with measurements of rdma-core's releases.

#![allow(clippy::unwrap_used)] // helpers of tests

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::mem::offset_of;
use std::process::Command;

use urnic_rdma_core::{consts::VALUES, private::*, *};

/// Size and field offsets of the Rust types, keyed as in C.
struct Layouts {
    ours: BTreeMap<String, usize>,
    c_prints: String,
}

impl Layouts {
    fn size(&mut self, c_type: &str, size: usize) {
        self.ours.insert(format!("sizeof {c_type}"), size);
        let _ = writeln!(
            self.c_prints,
            r#"printf("sizeof {c_type}=%zu\n", sizeof({c_type}));"#
        );
    }

    fn field(&mut self, c_type: &str, c_field: &str, offset: usize) {
        self.ours.insert(format!("{c_type}.{c_field}"), offset);
        let _ = writeln!(
            self.c_prints,
            r#"printf("{c_type}.{c_field}=%zu\n", offsetof({c_type}, {c_field}));"#
        );
    }

    /// Compiles and runs the C side; panics with the reason if that is impossible.
    fn theirs(&self) -> BTreeMap<String, usize> {
        let mut constants = String::new();
        for (name, _) in VALUES {
            let _ = writeln!(constants, r#"printf("{name}=%zd\n", (ssize_t){name});"#);
        }
        let source = format!(
            "#include <stdio.h>\n#include <stddef.h>\n#include <infiniband/verbs.h>\n\
             int main(void) {{\n{}{constants}return 0; }}\n",
            self.c_prints
        );
        let folder = urnic_testkit::Folder::new("layout");
        let (c, exe) = (folder.file("layout.c"), folder.file("layout"));
        std::fs::write(&c, source).unwrap();
        let compiled = Command::new("cc").arg(&c).arg("-o").arg(&exe).output();
        let ran = Command::new(&exe).output();
        let compiled = compiled.expect("no C compiler `cc`: install the package gcc");
        assert!(
            compiled.status.success(),
            "cannot compile against <infiniband/verbs.h>: install the package libibverbs-dev\n{}",
            String::from_utf8_lossy(&compiled.stderr)
        );
        let text = String::from_utf8(ran.expect("the layout program runs").stdout).unwrap();
        let parse = |line: &str| {
            let (key, value) = line.split_once('=')?;
            Some((key.to_owned(), value.parse::<isize>().ok()? as usize))
        };
        text.lines().map(|line| parse(line).unwrap()).collect()
    }
}

macro_rules! layouts {
    ($l:ident; $($name:ident { $($field:ident $(= $c:literal)?),* $(,)? })*) => {
        $(
            $l.size(concat!("struct ", stringify!($name)), size_of::<$name>());
            layouts!(@fields $l; $name { $($field $(= $c)?),* });
        )*
    };
    (@fields $l:ident; $name:ident { $($field:ident $(= $c:literal)?),* }) => {
        $($l.field(
            concat!("struct ", stringify!($name)),
            [$($c,)? stringify!($field)][0],
            offset_of!($name, $field),
        );)*
    };
}

#[test]
fn public_structs_and_constants_match_the_installed_header() {
    let mut l = Layouts {
        ours: BTreeMap::new(),
        c_prints: String::new(),
    };
    l.size("union ibv_gid", size_of::<ibv_gid>());
    layouts! { l;
        ibv_device { node_type, transport_type, name, dev_name, dev_path, ibdev_path }
        ibv_context_ops { _compat_query_device, alloc_mw, bind_mw, dealloc_mw, poll_cq, req_notify_cq,
            _compat_cq_event, post_srq_recv, post_send, post_recv, _compat_async_event }
        ibv_context { device, ops, cmd_fd, async_fd, num_comp_vectors, mutex, abi_compat }
        ibv_pd { context, handle }
        ibv_mr { context, pd, addr, length, handle, lkey, rkey }
        ibv_mw { context, pd, rkey, handle, type_ = "type" }
        ibv_ah { context, pd, handle }
        ibv_comp_channel { context, fd, refcnt }
        ibv_cq { context, channel, cq_context, handle, cqe, mutex, cond, comp_events_completed,
            async_events_completed }
        ibv_cq_ex { comp_events_completed, async_events_completed, comp_mask, status, wr_id, start_poll,
            next_poll, end_poll, read_opcode, read_vendor_err, read_byte_len, read_imm_data, read_qp_num,
            read_src_qp, read_wc_flags, read_slid, read_sl, read_dlid_path_bits, read_completion_ts, read_cvlan,
            read_flow_tag, read_tm_info, read_completion_wallclock_ns }
        ibv_srq { context, srq_context, pd, handle, mutex, cond, events_completed }
        ibv_qp { context, qp_context, pd, send_cq, recv_cq, srq, handle, qp_num, state, qp_type, mutex, cond,
            events_completed }
        ibv_async_event { element, event_type }
        ibv_sge { addr, length, lkey }
        ibv_data_buf { addr, length }
        ibv_mw_bind_info { mr, addr, length, mw_access_flags }
        ibv_mw_bind { wr_id, send_flags, bind_info }
        ibv_send_wr { wr_id, next, sg_list, num_sge, opcode, send_flags, imm_data, wr,
            remote_srqn = "qp_type.xrc.remote_srqn", extra = "bind_mw" }
        ibv_recv_wr { wr_id, next, sg_list, num_sge }
        ibv_wc { wr_id, status, opcode, vendor_err, byte_len, imm_data, qp_num, src_qp, wc_flags, pkey_index, slid,
            sl, dlid_path_bits }
        ibv_device_attr { fw_ver, node_guid, sys_image_guid, max_mr_size, page_size_cap, vendor_id, vendor_part_id,
            hw_ver, max_qp, max_qp_wr, device_cap_flags, max_sge, max_sge_rd, max_cq, max_cqe, max_mr, max_pd,
            max_qp_rd_atom, max_ee_rd_atom, max_res_rd_atom, max_qp_init_rd_atom, max_ee_init_rd_atom, atomic_cap,
            max_ee, max_rdd, max_mw, max_raw_ipv6_qp, max_raw_ethy_qp, max_mcast_grp, max_mcast_qp_attach,
            max_total_mcast_qp_attach, max_ah, max_fmr, max_map_per_fmr, max_srq, max_srq_wr, max_srq_sge,
            max_pkeys, local_ca_ack_delay, phys_port_cnt }
        ibv_query_device_ex_input { comp_mask }
        ibv_odp_caps { general_caps, rc_odp_caps = "per_transport_caps.rc_odp_caps",
            ud_odp_caps = "per_transport_caps.ud_odp_caps" }
        ibv_tso_caps { max_tso, supported_qpts }
        ibv_rss_caps { supported_qpts, rx_hash_fields_mask, rx_hash_function }
        ibv_packet_pacing_caps { qp_rate_limit_min, qp_rate_limit_max, supported_qpts }
        ibv_tm_caps { max_rndv_hdr_size, max_num_tags, flags, max_ops, max_sge }
        ibv_cq_moderation_caps { max_cq_count, max_cq_period }
        ibv_pci_atomic_caps { fetch_add, swap, compare_swap }
        ibv_device_attr_ex { orig_attr, comp_mask, odp_caps, completion_timestamp_mask, hca_core_clock,
            device_cap_flags_ex, tso_caps, rss_caps, max_wq_type_rq, packet_pacing_caps, raw_packet_caps, tm_caps,
            cq_mod_caps, max_dm_size, pci_atomic_caps, xrc_odp_caps, phys_port_cnt_ex }
        ibv_global_route { dgid, flow_label, sgid_index, hop_limit, traffic_class }
        ibv_ah_attr { grh, dlid, sl, src_path_bits, static_rate, is_global, port_num }
        ibv_srq_attr { max_wr, max_sge, srq_limit }
        ibv_srq_init_attr { srq_context, attr }
        ibv_srq_init_attr_ex { srq_context, attr, comp_mask, srq_type, pd, xrcd, cq, tm_cap }
        ibv_qp_cap { max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data }
        ibv_qp_init_attr { qp_context, send_cq, recv_cq, srq, cap, qp_type, sq_sig_all }
        ibv_rx_hash_conf { rx_hash_function, rx_hash_key_len, rx_hash_key, rx_hash_fields_mask }
        ibv_qp_init_attr_ex { qp_context, send_cq, recv_cq, srq, cap, qp_type, sq_sig_all, comp_mask, pd, xrcd,
            create_flags, max_tso_header, rwq_ind_tbl, rx_hash_conf, source_qpn, send_ops_flags }
        ibv_qp_attr { qp_state, cur_qp_state, path_mtu, path_mig_state, qkey, rq_psn, sq_psn, dest_qp_num,
            qp_access_flags, cap, ah_attr, alt_ah_attr, pkey_index, alt_pkey_index, en_sqd_async_notify,
            sq_draining, max_rd_atomic, max_dest_rd_atomic, min_rnr_timer, port_num, timeout, retry_cnt, rnr_retry,
            alt_port_num, alt_timeout, rate_limit }
        ibv_cq_init_attr_ex { cqe, cq_context, channel, comp_vector, wc_flags, comp_mask, flags, parent_domain }
        ibv_moderate_cq { cq_count, cq_period }
        ibv_modify_cq_attr { attr_mask, moderate }
        ibv_poll_cq_attr { comp_mask }
        ibv_wc_tm_info { tag, priv_ = "priv" }
        ibv_values_ex { comp_mask, raw_clock }
        ibv_ece { vendor_id, options, comp_mask }
        ibv_td { context }
        ibv_dm { context, memcpy_to_dm, memcpy_from_dm, comp_mask, handle }
        ibv_alloc_dm_attr { length, log_align_req, comp_mask }
        ibv_td_init_attr { comp_mask }
        ibv_parent_domain_init_attr { pd, td, comp_mask, alloc, free, pd_context }
    }
    // These structs grew at their ends: every release has these fields, but the sizes differ.
    layouts!(@fields l; ibv_port_attr { state, max_mtu, active_mtu, gid_tbl_len, port_cap_flags, max_msg_sz, bad_pkey_cntr, qkey_viol_cntr, pkey_tbl_len, lid, sm_lid, lmc, max_vl_num, sm_sl, subnet_timeout, init_type_reply, active_width, active_speed, phys_state, link_layer, flags, port_cap_flags2 });
    layouts!(@fields l; ibv_qp_ex { qp_base, comp_mask, wr_id, wr_flags, wr_atomic_cmp_swp, wr_atomic_fetch_add,
        wr_bind_mw, wr_local_inv, wr_rdma_read, wr_rdma_write, wr_rdma_write_imm, wr_send, wr_send_imm, wr_send_inv,
        wr_send_tso, wr_set_ud_addr, wr_set_xrc_srqn, wr_set_inline_data, wr_set_inline_data_list, wr_set_sge,
        wr_set_sge_list, wr_start, wr_complete, wr_abort });
    l.field(
        "struct ibv_send_wr",
        "wr.rdma.rkey",
        offset_of!(ibv_send_wr, wr) + offset_of!(ibv_send_wr_rdma, rkey),
    );
    l.field("struct ibv_send_wr", "wr.atomic.rkey", {
        offset_of!(ibv_send_wr, wr) + offset_of!(ibv_send_wr_atomic, rkey)
    });
    l.field("struct ibv_send_wr", "wr.ud.remote_qkey", {
        offset_of!(ibv_send_wr, wr) + offset_of!(ibv_send_wr_ud, remote_qkey)
    });
    l.field("struct ibv_send_wr", "bind_mw.bind_info", {
        offset_of!(ibv_send_wr, extra) + offset_of!(ibv_send_wr_bind_mw, bind_info)
    });
    l.field(
        "struct ibv_send_wr",
        "tso.mss",
        offset_of!(ibv_send_wr, extra) + offset_of!(ibv_send_wr_tso, mss),
    );
    l.c_prints += r#"printf("context_offset=%zu\n", offsetof(struct verbs_context, context));"#;

    let mut theirs = l.theirs();
    let context_offset = theirs.remove("context_offset").unwrap();
    assert!(
        Level::ALL
            .iter()
            .any(|level| level.context_offset() == context_offset),
        "the installed rdma-core has a verbs_context of an unknown level ({context_offset} bytes before its context)"
    );
    let mut ours = l.ours;
    for (name, value) in VALUES {
        ours.insert((*name).to_owned(), *value as usize);
    }
    let keys = ours.keys().chain(theirs.keys());
    let different: BTreeMap<_, _> = keys
        .filter(|key| ours.get(*key) != theirs.get(*key))
        .map(|key| (key, (ours.get(key), theirs.get(key))))
        .collect();
    assert!(different.is_empty(), "(ours, theirs): {different:#?}");
}

#[test]
fn each_level_has_the_measured_sizes() {
    let measured = [
        (Level::V36, 608, 320),
        (Level::V59, 632, 344),
        (Level::V62, 648, 352),
        (Level::V64, 664, 368),
        (Level::V65, 744, 368),
    ];
    for (level, ops, offset) in measured {
        assert_eq!(ContextOps::size(level), ops, "{level:?}");
        assert_eq!(level.context_offset(), offset, "{level:?}");
    }
}

#[test]
fn each_level_has_the_measured_op_offsets() {
    let measured = [
        (Level::V36, 152, 440),
        (Level::V59, 160, 456),
        (Level::V62, 160, 464),
        (Level::V64, 168, 480),
        (Level::V65, 176, 512),
    ];
    for (level, create_qp, post_send) in measured {
        assert_eq!(
            ContextOps::offset(level, "create_qp"),
            Some(create_qp),
            "{level:?}"
        );
        assert_eq!(
            ContextOps::offset(level, "post_send"),
            Some(post_send),
            "{level:?}"
        );
    }
    assert_eq!(ContextOps::offset(Level::V36, "alloc_buf"), None);
    assert_eq!(ContextOps::offset(Level::V65, "unimport_pd"), Some(736));
}

#[test]
fn ops_are_sorted_as_the_c_struct_is() {
    assert!(OPS.is_sorted_by(|a, b| a.name < b.name));
}

#[test]
fn an_op_lands_at_its_offset_and_unknown_ops_nowhere() {
    unsafe extern "C" fn dealloc(_: *mut ibv_pd) -> i32 {
        7
    }
    unsafe extern "C" fn speed(_: *mut ibv_context, _: u32, _: *mut u64) -> i32 {
        8
    }
    for level in Level::ALL {
        let ops = ContextOps::new(level).dealloc_pd(dealloc).query_port_speed(speed);
        // SAFETY: the table has a slot for every op of every level.
        let slots = unsafe { std::slice::from_raw_parts(ops.as_ptr().cast::<usize>(), OPS.len()) };
        let at = |name| ContextOps::offset(level, name).map(|offset| slots[offset / 8]);
        assert_eq!(at("dealloc_pd"), Some(dealloc as *const () as usize));
        let filled = slots.iter().filter(|slot| **slot != 0).count();
        if level < Level::V62 {
            assert_eq!(filled, 1, "{level:?}");
        } else {
            assert_eq!(at("query_port_speed"), Some(speed as *const () as usize));
            assert_eq!(filled, 2, "{level:?}");
        }
    }
}

#[test]
fn public_symbols_determine_the_level() {
    let with = |symbols: &'static [&'static str]| Level::detect(|s| symbols.contains(&s.to_str().unwrap()));
    assert_eq!(with(&[]), Level::V34);
    assert_eq!(with(&["ibv_import_dm"]), Level::V35);
    assert_eq!(with(&["ibv_import_dm", "ibv_query_qp_data_in_order"]), Level::V36);
    assert_eq!(
        with(&["ibv_query_qp_data_in_order", "ibv_alloc_dmah"]),
        Level::V59
    );
    assert_eq!(with(&["ibv_alloc_dmah", "ibv_dm_export_dmabuf_fd"]), Level::V62);
    assert_eq!(
        with(&["ibv_alloc_dmah", "ibv_dm_export_dmabuf_fd", "ibv_alloc_buf"]),
        Level::V64
    );
    assert_eq!(with(&["ibv_alloc_buf", "ibv_create_comp_cntr"]), Level::V65);
}

#[test]
fn private_symbols_carry_the_abi_number() {
    for pabi in Pabi::ALL {
        let n = pabi.number();
        assert_eq!(
            pabi.register_symbol().to_str().unwrap(),
            format!("verbs_register_driver_{n}")
        );
        assert_eq!(
            pabi.symbol_version().to_str().unwrap(),
            format!("IBVERBS_PRIVATE_{n}")
        );
        assert_eq!(pabi.provider_file(), format!("liburnic-rdmav{n}.so"));
    }
}

#[test]
fn the_qp_comp_mask_moved_inside_private_abi_34() {
    let offsets = [34, 43, 44, 45, 56].map(qp_comp_mask_offset);
    assert_eq!(offsets, [344, 344, 352, 360, 360]);
    assert!(size_of::<verbs_qp>() >= 360 + 8 + 8);
}
