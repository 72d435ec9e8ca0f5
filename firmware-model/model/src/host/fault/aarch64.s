// Accesses to memory that may vanish, as in x86_64.s.

    .text
    .p2align 6
    .hidden urnic_guarded_begin, urnic_guarded_end, urnic_guarded_failed
    .globl urnic_guarded_begin, urnic_guarded_end, urnic_guarded_failed
    .hidden urnic_guarded_copy, urnic_guarded_probe, urnic_guarded_load, urnic_guarded_compare_exchange
    .globl urnic_guarded_copy, urnic_guarded_probe, urnic_guarded_load, urnic_guarded_compare_exchange
urnic_guarded_begin:

// w0 = urnic_guarded_copy(x0 = to, x1 = from, x2 = bytes): 0, or 1 after a fault.
    .type urnic_guarded_copy, %function
urnic_guarded_copy:
    .cfi_startproc
    hint #34
    add x3, x1, x2
    add x4, x0, x2
    cmp x2, #16
    b.lo 3f
    cmp x2, #32
    b.hi 1f
    ldr q0, [x1]
    ldur q1, [x3, #-16]
    str q0, [x0]
    stur q1, [x4, #-16]
    mov w0, #0
    ret
1:  cmp x2, #64
    b.hi 4f
    ldp q0, q1, [x1]
    ldp q2, q3, [x3, #-32]
    stp q0, q1, [x0]
    stp q2, q3, [x4, #-32]
    mov w0, #0
    ret

// Fewer than 16 bytes: two loads that may overlap.
3:  tbz x2, #3, 31f
    ldr x5, [x1]
    ldur x6, [x3, #-8]
    str x5, [x0]
    stur x6, [x4, #-8]
    mov w0, #0
    ret
31: tbz x2, #2, 32f
    ldr w5, [x1]
    ldur w6, [x3, #-4]
    str w5, [x0]
    stur w6, [x4, #-4]
    mov w0, #0
    ret
32: cbz x2, 33f
    ldrb w5, [x1]
    strb w5, [x0]
    tbz x2, #1, 33f
    ldurh w6, [x3, #-2]
    sturh w6, [x4, #-2]
33: mov w0, #0
    ret

// More than 64 bytes: 64 at a time, the last 64 again.
4:  sub x5, x4, #64
    .p2align 4
41: ldp q0, q1, [x1]
    ldp q2, q3, [x1, #32]
    add x1, x1, #64
    stp q0, q1, [x0]
    stp q2, q3, [x0, #32]
    add x0, x0, #64
    cmp x0, x5
    b.lo 41b
    ldp q0, q1, [x3, #-64]
    ldp q2, q3, [x3, #-32]
    stp q0, q1, [x4, #-64]
    stp q2, q3, [x4, #-32]
    mov w0, #0
    ret
    .cfi_endproc
    .size urnic_guarded_copy, . - urnic_guarded_copy

// w0 = urnic_guarded_probe(x0 = first byte, x1 = last byte): 0, or 1 after a fault. Reads a byte of each page.
    .type urnic_guarded_probe, %function
    .p2align 4
urnic_guarded_probe:
    .cfi_startproc
    hint #34
1:  ldrb w2, [x0]
    add x0, x0, #4096
    cmp x0, x1
    b.lo 1b
    ldrb w2, [x1]
    mov w0, #0
    ret
    .cfi_endproc
    .size urnic_guarded_probe, . - urnic_guarded_probe

// w0 = urnic_guarded_load(x0 = aligned word, x1 = result): 0, or 1 after a fault.
    .type urnic_guarded_load, %function
    .p2align 4
urnic_guarded_load:
    .cfi_startproc
    hint #34
    ldar x2, [x0]
    str x2, [x1]
    mov w0, #0
    ret
    .cfi_endproc
    .size urnic_guarded_load, . - urnic_guarded_load

// w0 = urnic_guarded_compare_exchange(x0 = aligned word, x1 = expected, x2 = new, x3 = what was there): 0, or 1 after a fault.
    .type urnic_guarded_compare_exchange, %function
    .p2align 4
urnic_guarded_compare_exchange:
    .cfi_startproc
    hint #34
1:  ldaxr x4, [x0]
    cmp x4, x1
    b.ne 2f
    stlxr w5, x2, [x0]
    cbnz w5, 1b
2:  str x4, [x3]
    mov w0, #0
    ret
    .cfi_endproc
    .size urnic_guarded_compare_exchange, . - urnic_guarded_compare_exchange

urnic_guarded_end:
    .type urnic_guarded_failed, %function
urnic_guarded_failed:
    .cfi_startproc
    mov w0, #1
    ret
    .cfi_endproc
    .size urnic_guarded_failed, . - urnic_guarded_failed
