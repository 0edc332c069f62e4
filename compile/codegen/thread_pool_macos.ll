; What the threads of `thread_pool.ll` ask of Linux, made of what macOS 14.4 has. Linked into libraries for macOS beside it.
; macOS binds no thread to a processor, so nobody is told where it runs.

target triple = "arm64-apple-macos14.4-elf"

declare i64 @clock_gettime_nsec_np(i32)
declare i32 @os_sync_wait_on_address(ptr, i64, i64, i32)
declare i32 @os_sync_wake_by_address_all(ptr, i64, i32)
declare i32 @dladdr(ptr, ptr)
declare ptr @dlopen(ptr, i32)
declare void @llvm.va_start(ptr)
declare void @llvm.va_end(ptr)

define hidden i32 @clock_gettime(i32 %clock, ptr %time) {  ; {seconds, nanoseconds}: none, and all
  %ns = call i64 @clock_gettime_nsec_np(i32 8)     ; CLOCK_UPTIME_RAW
  store i64 0, ptr %time
  %ns_at = getelementptr { i64, i64 }, ptr %time, i32 0, i32 1
  store i64 %ns, ptr %ns_at
  ret i32 0
}

; A futex, the one system call that is made: sleep while a word has a value, or wake all who sleep on it.
define hidden i64 @syscall(i64 %number, ...) {
  %arguments = alloca [4 x i64], align 16
  call void @llvm.va_start(ptr %arguments)
  %word = va_arg ptr %arguments, ptr
  %operation = va_arg ptr %arguments, i32
  %value32 = va_arg ptr %arguments, i32
  call void @llvm.va_end(ptr %arguments)
  %value = zext i32 %value32 to i64
  %is_wait = icmp eq i32 %operation, 128           ; FUTEX_WAIT_PRIVATE
  br i1 %is_wait, label %wait, label %wake
wait:
  call i32 @os_sync_wait_on_address(ptr %word, i64 %value, i64 4, i32 0)
  ret i64 0
wake:
  call i32 @os_sync_wake_by_address_all(ptr %word, i64 4, i32 0)
  ret i64 0
}

define hidden i32 @sched_getcpu() {
  ret i32 -1
}

define hidden i32 @sched_getaffinity(i32 %thread, i64 %size, ptr %mask) {
  ret i32 -1
}

define hidden i32 @sched_setaffinity(i32 %thread, i64 %size, ptr %mask) {
  ret i32 -1
}

; Asked when threads are started, which run this code from now on: open the library once more, so that it stays.
define hidden i32 @gettid() {
  %found = alloca { ptr, ptr, ptr, ptr }
  call i32 @dladdr(ptr @gettid, ptr %found)
  %path = load ptr, ptr %found
  call ptr @dlopen(ptr %path, i32 2)               ; RTLD_NOW
  ret i32 0
}
