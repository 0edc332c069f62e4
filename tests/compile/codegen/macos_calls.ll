; macOS's calls on addresses and clocks, made of Linux's on x86-64, and how often threads slept.

target triple = "x86_64-linux-gnu"

@num_sleeps = global i32 0

define hidden i32 @os_sync_wait_on_address(ptr %word, i64 %value, i64 %size, i32 %flags) {
  atomicrmw add ptr @num_sleeps, i32 1 seq_cst
  call i64 asm sideeffect "syscall", "={rax},{rax},{rdi},{rsi},{rdx},{r10},~{rcx},~{r11},~{memory}"(i64 202, ptr %word, i64 128, i64 %value, i64 0)
  ret i32 0
}

define hidden i32 @os_sync_wake_by_address_all(ptr %word, i64 %size, i32 %flags) {
  call i64 asm sideeffect "syscall", "={rax},{rax},{rdi},{rsi},{rdx},~{rcx},~{r11},~{memory}"(i64 202, ptr %word, i64 129, i64 2147483647)
  ret i32 0
}

define hidden i64 @clock_gettime_nsec_np(i32 %clock) {
  %time = alloca { i64, i64 }
  call i64 asm sideeffect "syscall", "={rax},{rax},{rdi},{rsi},~{rcx},~{r11},~{memory}"(i64 228, i64 1, ptr %time)
  %s = load i64, ptr %time
  %ns_at = getelementptr { i64, i64 }, ptr %time, i32 0, i32 1
  %ns = load i64, ptr %ns_at
  %whole = mul i64 %s, 1000000000
  %now = add i64 %whole, %ns
  ret i64 %now
}
