# A system call that is made only while two words have the values that are expected, as a critical section of rseq(2): if the kernel preempts,
# signals or stops the thread anywhere between the first check and the system call, the thread continues at `urnic_revocable_interrupted`.

    .section .data.rel.ro.urnic_revocable, "aw"
    .p2align 5
# struct rseq_cs: version, flags, first instruction, length, where an interrupted thread continues.
urnic_revocable_section:
    .long 0, 0
    .quad urnic_revocable_begin
    .quad urnic_revocable_end - urnic_revocable_begin
    .quad urnic_revocable_interrupted

    .text
    .p2align 6
    .hidden urnic_revocable_call
    .globl urnic_revocable_call
# rax = urnic_revocable_call(rdi = struct Call, rsi = rseq_cs of the thread's struct rseq): the result of the system call, i64::MIN if a word
# has another value, or i64::MIN + 1 after an interruption. The system call was made in the first case only.
    .type urnic_revocable_call, @function
urnic_revocable_call:
    .cfi_startproc
    push rbx
    .cfi_adjust_cfa_offset 8
    .cfi_offset rbx, -16
    push r12
    .cfi_adjust_cfa_offset 8
    .cfi_offset r12, -24
    mov rbx, rdi
    mov r12, rsi
    mov rdi, [rbx + 40]
    mov rsi, [rbx + 48]
    mov rdx, [rbx + 64]
    mov r10, [rbx + 56]
    mov r8, [rbx + 64]
    xor r9d, r9d
    lea rax, [rip + urnic_revocable_section]
    mov [r12], rax
urnic_revocable_begin:
    mov rax, [rbx]
    mov rax, [rax]
    cmp rax, [rbx + 8]
    jne 1f
    mov rax, [rbx + 16]
    mov rax, [rax]
    cmp rax, [rbx + 24]
    jne 1f
    mov rax, [rbx + 32]
    syscall
urnic_revocable_end:
    jmp 3f
1:  movabs rax, 0x8000000000000000
    jmp 3f
2:  movabs rax, 0x8000000000000001
3:  mov qword ptr [r12], 0
    pop r12
    .cfi_adjust_cfa_offset -8
    .cfi_restore r12
    pop rbx
    .cfi_adjust_cfa_offset -8
    .cfi_restore rbx
    ret
    .cfi_endproc
    .size urnic_revocable_call, . - urnic_revocable_call

# The kernel requires the signature of the thread's registration (glibc's RSEQ_SIG) before the place of continuation: here inside of `ud1`.
    .byte 0x0f, 0xb9, 0x3d
    .long 0x53053053
urnic_revocable_interrupted:
    jmp 2b
